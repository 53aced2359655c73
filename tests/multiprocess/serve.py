# SPDX-License-Identifier: Apache-2.0
"""Runs an `AsyncLLM` over several processes, and saves the content of its outputs.

    python -m tests.multiprocess.serve ORDER.json

A separate process, for the same reasons as `observe.py`.
"""

import asyncio
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.multiprocess.apart import ON_CPU, carry_out, runner
from tests.multiprocess.observe import (
    COMPLETE,
    EVERYWHERE,
    READOUTS,
    feature_options,
    gated,
    greedy,
    keep,
    operated,
    told,
    turn,
)

READ: dict[str, Any] = {
    "rows": {"kind": "rows", "hooks": {"post_block": "all"}, "positions": "all"},
    "norms": {"kind": "norm", "hooks": {"post_block": "all"}},
}
PROMPT_LENGTHS = (40, 5, 21, 40)
"""The first and the last are the same prompt."""


@dataclass(frozen=True, slots=True)
class Order:
    """The configuration of a run."""

    model: str
    root: str
    """Folder for files and results."""
    pipeline: int = 1
    data: int = 1
    tensor: int = 1
    experts: bool = False
    """Whether the model has experts, which data-parallel engines divide."""

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables."""
        completed = {COMPLETE: "1"} if self.experts else {}
        chosen = {"VLLM_USE_V2_MODEL_RUNNER": runner(self.pipeline)}
        return ON_CPU | chosen | completed


async def serve(order: Order) -> dict[str, Any]:
    """The outputs of concurrent requests, one by one."""
    from tests.support import asynchronous
    from tests.support.captured import Keeper, prompt
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    keeper = Keeper()
    with asynchronous.allowed():
        engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=order.model,
                dtype="float32",
                enforce_eager=True,
                max_model_len=128,
                max_num_seqs=8,
                max_num_batched_tokens=24,
                skip_tokenizer_init=True,
                disable_log_stats=True,
                **feature_options(Path(order.root)),
                allow_remote_code_hooks=True,
                max_logprobs=-1,
                enable_patching=True,
                max_patch_slots=4,
                enable_expert_parallel=order.experts,
                gpu_memory_utilization=0.2,
                pipeline_parallel_size=order.pipeline,
                tensor_parallel_size=order.tensor,
                data_parallel_size=order.data,
                # Steps are computed ahead, also by stages.
                async_scheduling=order.pipeline > 1,
                capture_consumers=[
                    keeper,
                    "inline",
                    f"filesystem:root={order.root}/files",
                ],
            )
        )
    try:
        prompts = [prompt(length, seed=length) for length in PROMPT_LENGTHS]
        asked = [
            _answers(engine, f"r{i}", ids, i % order.data)
            for i, ids in enumerate(prompts)
        ]
        answers = await asyncio.gather(*asked)
        featured = await asyncio.gather(
            *(
                _featured(engine, f"f{i}", prompts[0], fields, i % order.data)
                for i, fields in enumerate(featured_requests())
            )
        )
        patched = await _patched(engine, prompts, order.data)
        counters = engine.capture.describe()["counters"]
    finally:
        engine.shutdown()
    for number, answer in enumerate(answers):
        answer["prompt"] = prompts[number]
        answer["kept"] = keeper.rows[f"r{number}", 0]
    return {
        "answers": answers,
        "featured": featured,
        "patched": patched,
        "counters": counters,
        "kept": len(keeper.rows),
    }


def featured_requests() -> list[dict[str, Any]]:
    """Requests for every feature, several times, so that each engine has them."""
    from vllm.interop.vllm_lens import Hook

    hooks = [Hook(turn, [0, 3]), Hook(keep, [2])]
    each = [{"readouts": READOUTS}, told((0, "pre_attn"), (3, "post_attn"))]
    each.append({"extra_args": {"apply_hooks": hooks}})
    return [{}, *(gated() + operated() + each) * 2]


async def _featured(
    engine: Any, name: str, ids: list[int], fields: dict[str, Any], rank: int
) -> dict[str, Any]:
    """What a request's features have done."""
    params = greedy(logprobs=-1, **fields)
    given = {"prompt_token_ids": ids}
    stream = engine.generate(given, params, name, data_parallel_rank=rank)
    output = [one async for one in stream][-1]
    rows = output.outputs[0].logprobs
    readouts = output.readouts or {}
    return {
        "tokens": list(output.outputs[0].token_ids),
        "logprobs": [[row[t].logprob for t in sorted(row)] for row in rows],
        "arrays": {
            (label, key): array
            for label, one in readouts.items()
            for key, array in one.arrays.items()
        },
        "errors": [one.error for one in readouts.values() if one.error],
        "receipt": output.steering,
        "hooks": getattr(output, "hook_results", None),
    }


async def _patched(
    engine: Any, prompts: list[list[int]], engines: int
) -> list[dict[str, Any]]:
    """Requests at each engine whose rows are replaced by those that the first kept."""
    spec = {"run": "clean", "hooks": {"post_block": [1, 3]}}
    kept = {"capture": {"patch_source": spec}, "capture_wait": True}
    await _featured(engine, "kept", prompts[0], kept, 0)
    entry = {"op": "replace", "from": {"run": "clean"}, "positions": [2, 7]}
    fields = {"steering_vectors": {"post_block": {1: [entry], 3: [entry]}}}
    other = [*reversed(prompts[0])]
    found = [
        await _featured(engine, f"patched{n}", other, fields, n % engines)
        for n in range(2)
    ]
    return [await _featured(engine, "unpatched", other, {}, 0), *found]


async def _answers(engine: Any, name: str, ids: list[int], rank: int) -> dict[str, Any]:
    from vllm.sampling_params import RequestOutputKind

    spec = {"hooks": EVERYWHERE, "positions": "all"}
    params = greedy(
        output_kind=RequestOutputKind.CUMULATIVE,
        capture={"keeper": spec, "inline": spec, "filesystem": {**spec, "tag": name}},
        capture_wait=True,
        readouts=READ,
    )
    outputs: list[dict[str, Any]] = []
    given = {"prompt_token_ids": ids}
    async for output in engine.generate(given, params, name, data_parallel_rank=rank):
        results = output.capture_results or {}
        shown = results["inline"].payload
        outputs.append(
            {
                "tokens": list(output.outputs[0].token_ids),
                "statuses": {n: (r.status, r.error) for n, r in results.items()},
                "rows": dict(shown),
                "positions": dict(shown.positions),
                "readouts": output.readouts,
            }
        )
    return {"outputs": outputs, "files": results["filesystem"].payload}


def main() -> None:
    """Execute the order in the file on the command line."""
    order = Order(**json.loads(Path(sys.argv[1]).read_text()))
    import torch

    torch.save(asyncio.run(serve(order)), f"{order.root}/found.pt")


def run(order: Order, timeout: float = 600) -> dict[str, Any]:
    """Execute an order in another process."""
    Path(order.root, "files").mkdir()
    return carry_out(
        "tests.multiprocess.serve", order, Path(order.root, "found.pt"), timeout
    )


if __name__ == "__main__":
    main()

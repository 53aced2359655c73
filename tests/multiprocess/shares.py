# SPDX-License-Identifier: Apache-2.0
"""Runs engines whose tensor-parallel ranks split the tokens between layers.

    python -m tests.multiprocess.shares ORDER.json

A separate process, because an engine leaves a process group behind.
"""

import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.multiprocess.apart import ON_CPU, carry_out
from tests.multiprocess.experts import complete_on_cpu, share_in_one_engine

LAYERS = 4
LENGTHS = (5, 40, 21, 6)
"""Lengths that are computed in several steps of all parities; the last steps have a
single token, which only the first rank has."""
NEW_TOKENS = 6
FLAGS = ("use_sequence_parallel_moe", "use_attn_reduce_scatter_for_moe")
"""Attributes by which layers show that they split tokens; each layer has one."""
STEERED = ((0, "post_block"), (1, "pre_attn"), (2, "post_attn"), (3, "pre_attn"))
"""The taps of steered requests, one each, in one batch."""


@dataclass(frozen=True, slots=True)
class Order:
    """The configuration of a run."""

    model: str
    found: str
    """File for the results."""
    width: int
    shares: bool
    engines: int = 1
    """Number of data-parallel engines, each over two ranks. With one engine upstream
    would not split tokens."""
    runner: int = 1
    cuda: bool = False
    eager: bool = True
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further options of the engine."""

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of all processes, which read the last three."""
        on_cpu = ON_CPU | {"VLLM_USE_V2_MODEL_RUNNER": str(self.runner - 1)}
        return ({} if self.cuda else on_cpu) | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(self.engines > 1)),
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
            "CLEARBOX_TEST_INTERPRETED": str(int(self.runner == 2 and not self.cuda)),
            "CLEARBOX_TEST_ON_CPU": str(int(not self.cuda)),
            "CLEARBOX_TEST_ONE_ENGINE": str(int(self.shares and self.engines == 1)),
        }

    @property
    def options(self) -> dict[str, Any]:
        """The options of the engine."""
        on_cuda = {"dtype": "bfloat16", "kv_cache_memory_bytes": 1 << 30}
        common = {
            "model": self.model,
            "enforce_eager": self.eager,
            "tensor_parallel_size": 2 if self.shares else 1,
            "enable_expert_parallel": self.shares,
            "skip_tokenizer_init": True,
            "disable_log_stats": True,
            "max_model_len": 256,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 24,
            "max_logprobs": -1,
            "enable_steering": True,
            "enable_prefix_caching": False,
        }
        return {
            **common,
            **(on_cuda if self.cuda else {"dtype": "float32"}),
            **self.more,
        }


# Set here, because the engine's processes import this module again before they import
# vllm.
if os.environ.get("CLEARBOX_TEST_INTERPRETED") == "1":
    import tests.support.interpreted  # noqa: F401
if os.environ.get("CLEARBOX_TEST_ON_CPU") == "1":
    complete_on_cpu()
if os.environ.get("CLEARBOX_TEST_ONE_ENGINE") == "1":
    share_in_one_engine()


def vector(seed: int, width: int) -> list[float]:
    """A random vector."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(width, generator=generator).tolist()


def added(layer: int, hook: str, width: int) -> dict[str, Any]:
    """Vectors for prompt tokens and for generated ones."""
    tiers = ("prefill_steering_vectors", "decode_steering_vectors")
    return {
        tier: {hook: {layer: vector(10 * layer + number, width)}}
        for number, tier in enumerate(tiers)
    }


def operated(layer: int, hook: str, width: int) -> dict[str, Any]:
    """Two operations on whole rows, one of them at single positions."""
    replaced, clamped = vector(layer, width), vector(90 + layer, width)
    entries = [
        {"vector": replaced, "op": "replace", "scale": 2.0, "positions": [1, 3]},
        {"vector": clamped, "op": "clamp", "min": -0.25, "max": 0.25},
    ]
    return {"steering_vectors": {hook: {layer: entries}}}


Asked = Mapping[str, Sequence[tuple[list[int], Any]]]
"""Prompts with the parameters of requests, by kind."""


def asked(width: int) -> Asked:
    """All requests."""
    from tests.support.captured import asking, prompt

    common = {"logprobs": -1, "detokenize": False, "capture_wait": True}
    prompts = [prompt(length, seed=length) for length in LENGTHS]
    kinds: dict[str, list[dict[str, Any]]] = {
        "plain": [{} for _ in prompts],
        "added": [added(*tap, width) for tap in STEERED],
        "operated": [operated(*tap, width) for tap in STEERED],
        "alone": [operated(*STEERED[2], width)],
    }
    return {
        kind: [
            (
                ids,
                asking("all", None, NEW_TOKENS, **common, **chosen),
            )
            for ids, chosen in zip(prompts, fields, strict=False)
        ]
        for kind, fields in kinds.items()
    }


def observe(order: Order) -> dict[str, Any]:
    """Collect rows, tokens and log-probabilities of one engine's requests."""
    from tests.support.captured import CapturedEngine

    options = dict(order.options)
    engine = CapturedEngine(
        Path(options.pop("model")),
        reference="none",
        distributed_executor_backend="mp" if order.shares else "uni",
        **options,
    )
    found: dict[str, Any] = {
        "shares": [engine.llm.collective_rpc(layers_that_share)[0]]
    }
    for kind, requests in asked(order.width).items():
        outputs = engine.run(*map(list, zip(*requests, strict=True)))
        found[kind] = [shown(output, engine.keeper) for output in outputs]
    engine.close()
    return found


async def observe_engines(order: Order) -> dict[str, Any]:
    """The same for several engines, between which the requests alternate."""
    from tests.support.captured import Keeper
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    keeper = Keeper()
    args = AsyncEngineArgs(
        data_parallel_size=order.engines, capture_consumers=[keeper], **order.options
    )
    engine = AsyncLLM.from_engine_args(args)

    async def answer(name: str, ids: list[int], params: Any, rank: int) -> Any:
        given = {"prompt_token_ids": ids}
        stream = engine.generate(given, params, name, data_parallel_rank=rank)
        return [output async for output in stream][-1]

    try:
        found: dict[str, Any] = {
            "shares": await engine.collective_rpc(layers_that_share)
        }
        for kind, requests in asked(order.width).items():
            outputs = await asyncio.gather(
                *(
                    answer(f"{kind}-{number}", ids, params, number % order.engines)
                    for number, (ids, params) in enumerate(requests)
                )
            )
            found[kind] = [shown(output, keeper) for output in outputs]
    finally:
        engine.shutdown()
    return found


def layers_that_share(worker: Any) -> list[bool]:
    """For `collective_rpc`: whether tokens are split after each layer's attention."""
    layers = worker.model_runner.model.model.layers
    return [any(getattr(layer, flag, False) for flag in FLAGS) for layer in layers]


def shown(output: Any, keeper: Any) -> dict[str, Any]:
    """The answer to a request, for comparison."""
    (sample,), name = output.outputs, output.request_id
    rows = keeper.rows.get((name, 0), {})
    sidecars = keeper.sidecars.get((name, 0), {})
    return {
        "prompt": list(output.prompt_token_ids),
        "tokens": list(sample.token_ids),
        "logprobs": [[row[t].logprob for t in sorted(row)] for row in sample.logprobs],
        "rows": rows,
        "positions": {tap: sidecars[tap]["positions"] for tap in rows},
        "results": {k: (r.status, r.error) for k, r in output.capture_results.items()},
    }


def main() -> None:
    """Execute the order in the file on the command line."""
    order = Order(**json.loads(Path(sys.argv[1]).read_text()))
    found = (
        observe(order) if order.engines == 1 else asyncio.run(observe_engines(order))
    )
    torch.save(found, order.found)


def run(order: Order, timeout: float = 600) -> dict[str, Any]:
    """Execute an order in another process."""
    return carry_out("tests.multiprocess.shares", order, Path(order.found), timeout)


if __name__ == "__main__":
    main()

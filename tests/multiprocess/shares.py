# SPDX-License-Identifier: Apache-2.0
"""Run an engine whose tensor-parallel ranks share the tokens between layers.

    python -m tests.multiprocess.shares ORDER.json

A process of its own, because an engine leaves a process group behind. Upstream shares
tokens only with data parallelism on top, and on a CPU its experts lack two collectives
and take every expert for a rank's own. `on_one_engine` supplies what is missing.
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
    # Here, since workers import this module anew before they import vllm.
    import tests.engines.interpreted  # noqa: F401

SHARES = "CLEARBOX_TEST_SHARES"
"""The variable that says that ranks share tokens, in all processes of the engine."""
HIDDEN, LAYERS = 64, 4
LENGTHS = (5, 40, 21, 6)
"""Computed in several steps of all parities; the last ones have a single token, which
only the first rank has."""
NEW_TOKENS = 6
STEERED = ((0, "post_block"), (1, "pre_attn"), (2, "post_attn"), (3, "pre_attn"))
"""Where requests are steered: each of them elsewhere, in one batch."""


def on_one_engine() -> None:
    """Let one engine share tokens, on a CPU too."""
    from vllm.config import ParallelConfig
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import (
        CPUUnquantizedExperts,
    )

    ParallelConfig.use_sequence_parallel_moe = property(  # type: ignore[method-assign, assignment]
        lambda self: self.enable_expert_parallel and self.tensor_parallel_size > 1
    )

    def all_gatherv(self: Any, given: Any, dim: int = 0, sizes: Any = None) -> Any:
        assert len(set(sizes)) == 1, "one engine's shares are equal"
        if isinstance(given, torch.Tensor):
            return self.all_gather(given.contiguous(), dim)
        return [self.all_gather(one.contiguous(), dim) for one in given]

    def reduce_scatterv(self: Any, given: Any, dim: int = 0, sizes: Any = None) -> Any:
        assert len(set(sizes)) == 1, "one engine's shares are equal"
        return self.reduce_scatter(given, dim)

    run_experts = CPUUnquantizedExperts.apply

    def apply(self: Any, **given: Any) -> None:
        if given["expert_map"] is not None:
            own = given["expert_map"][given["topk_ids"].long()]
            given["topk_weights"] = given["topk_weights"] * (own >= 0)
            given["topk_ids"] = own.clamp(min=0).to(given["topk_ids"].dtype)
        run_experts(self, **given)

    CPUUnquantizedExperts.apply = apply  # type: ignore[method-assign, assignment]
    CpuCommunicator.all_gatherv = all_gatherv  # type: ignore[method-assign]
    CpuCommunicator.reduce_scatterv = reduce_scatterv  # type: ignore[method-assign]


if os.environ.get(SHARES) == "1":
    on_one_engine()


@dataclass(frozen=True, slots=True)
class Order:
    """What to run."""

    model: str
    found: str
    """Where to write what was found."""
    shares: bool
    runner: int = 1

    @property
    def environment(self) -> dict[str, str]:
        """What the process needs."""
        return {
            SHARES: str(int(self.shares)),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_USE_V2_MODEL_RUNNER": str(self.runner - 1),
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",
        }


def vector(seed: int) -> list[float]:
    """A random vector."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(HIDDEN, generator=generator).tolist()


def added(layer: int, hook: str) -> dict[str, Any]:
    """Vectors for the prompt and for what is generated."""
    tiers = ("prefill_steering_vectors", "decode_steering_vectors")
    return {t: {hook: {layer: vector(10 * layer + i)}} for i, t in enumerate(tiers)}


def operated(layer: int, hook: str) -> dict[str, Any]:
    """Two operations on whole rows, one of them at single positions."""
    entries = [
        {"vector": vector(layer), "op": "replace", "scale": 2.0, "positions": [1, 3]},
        {"vector": vector(90 + layer), "op": "clamp", "min": -0.25, "max": 0.25},
    ]
    return {"steering_vectors": {hook: {layer: entries}}}


def observe(order: Order) -> dict[str, Any]:
    """Rows, tokens and log-probabilities of an engine's requests."""
    from tests.engines.captured import CapturedEngine, prompt

    engine = CapturedEngine(
        Path(order.model),
        reference="none",
        skip_tokenizer_init=True,
        tensor_parallel_size=2 if order.shares else 1,
        enable_expert_parallel=order.shares,
        attention_backend="CPU_MLA",
        max_num_batched_tokens=24,
        max_logprobs=-1,
        enable_steering=True,
        enable_prefix_caching=False,
        distributed_executor_backend="mp" if order.shares else "uni",
    )
    prompts = [prompt(length, seed=length) for length in LENGTHS]
    found = {"shares": engine.llm.collective_rpc(layers_that_share)[0]}
    kinds = {
        "plain": [{} for _ in prompts],
        "added": [added(*tap) for tap in STEERED],
        "operated": [operated(*tap) for tap in STEERED],
    }
    for kind, fields in kinds.items():
        found[kind] = _requests(engine, prompts, fields)
    engine.close()
    return found


def layers_that_share(worker: Any) -> list[bool]:
    """For `collective_rpc`: whether tokens are shared behind each layer's attention."""
    layers = worker.model_runner.model.model.layers
    return [layer.use_sequence_parallel_moe for layer in layers]


def _requests(engine: Any, prompts: Any, fields: Any) -> list[dict[str, Any]]:
    from tests.engines.captured import asking

    params = [
        asking("all", None, NEW_TOKENS, logprobs=-1, detokenize=False, **chosen)
        for chosen in fields
    ]
    found = []
    for output in engine.run(prompts, params):
        told = output.outputs[0].logprobs
        found.append(
            {
                "prompt": list(output.prompt_token_ids),
                "tokens": list(output.outputs[0].token_ids),
                "logprobs": [[row[t].logprob for t in sorted(row)] for row in told],
                "rows": engine.rows(output),
                "sidecars": engine.sidecars(output),
            }
        )
    return found


def main() -> None:
    """Carry out the order whose file is named on the command line."""
    order = Order(**json.loads(Path(sys.argv[1]).read_text()))
    torch.save(observe(order), order.found)


def run(order: Order, timeout: float = 600) -> dict[str, Any]:
    """Carry out an order in another process."""
    note = Path(order.found).with_suffix(".json")
    note.write_text(json.dumps(asdict(order)))
    done = subprocess.run(
        [sys.executable, "-m", "tests.multiprocess.shares", str(note)],
        cwd=Path(__file__).parents[2],
        env=os.environ | order.environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout[-9000:] + done.stderr[-9000:]
    found: dict[str, Any] = torch.load(order.found, weights_only=False)
    return found


if __name__ == "__main__":
    main()

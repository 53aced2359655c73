# SPDX-License-Identifier: Apache-2.0
"""What the engine core calls in workers for readouts, by `collective_rpc`.

Each function gets the worker. They are sent by name, so they stay at module level.
"""

from typing import Any

import torch

from vllm.v1.readouts.worker.modules import WorkerModules
from vllm.v1.residual.tap import Tap


def load_module(worker: Any, name: str, path: str, tap: Tap | None) -> None:
    """For `collective_rpc`: load a probe, translator or SAE."""
    _modules_to_change(worker).load(name, path, tap)


def unload_module(worker: Any, name: str) -> None:
    """For `collective_rpc`: unload a probe, translator or SAE."""
    _modules_to_change(worker).unload(name)


def _modules_to_change(worker: Any) -> WorkerModules:
    modules: WorkerModules = worker.model_runner.residual.modules
    return modules


def readout_counters(worker: Any) -> dict[str, dict[str, float]]:
    """For `collective_rpc`: number of rows read out, and seconds it took, by kind."""
    readouts = worker.model_runner.residual.readouts
    if readouts is None:
        return {}
    return {
        kind: {"rows": one.rows, "seconds": one.seconds}
        for kind, one in readouts.counters.items()
    }


def decode_rows(worker: Any, rows: bytes, count: int, top_k: int | None) -> Any:
    """For `collective_rpc`: float32 logits of rows in float32, on the first rank.

    Of the `top_k` largest the ids come before them. None on ranks that get no logits or
    have no head.

    Raises:
        ValueError: the model has no head that supports this.

    """
    runner = worker.model_runner
    readouts = runner.residual.readouts
    if readouts is None:
        return None
    if readouts.head.refusal:
        raise ValueError(readouts.head.refusal)
    given = torch.frombuffer(bytearray(rows), dtype=torch.float32).view(count, -1)
    with torch.inference_mode():
        placed = given.to(runner.device, worker.vllm_config.model_config.dtype)
        logits = readouts.head.logits(placed)
        if logits is None:
            return None
        if top_k is None:
            return (logits.float().cpu(),)
        top = torch.topk(logits.float(), min(top_k, logits.shape[-1]), dim=-1)
        return top.indices.cpu(), top.values.cpu()


def unembedding_rows(worker: Any, tokens: list[int]) -> Any:
    """For `collective_rpc`: rows of the unembedding, and which are this rank's."""
    readouts = worker.model_runner.residual.readouts
    if readouts is None:
        return None
    rows, own = readouts.head.unembedding(tokens)
    return rows.detach().cpu(), own.cpu()

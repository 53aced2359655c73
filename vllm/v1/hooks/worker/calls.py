# SPDX-License-Identifier: Apache-2.0
"""What the engine core calls in workers for functions, by `collective_rpc`.

Each function gets the worker. They are sent by name, so they stay at module level.
"""

from typing import Any

import torch

from vllm.v1.hooks.worker.worker import WorkerHooks


def take_results(worker: Any, key: str) -> bytes | None:
    """For `collective_rpc`: remove and return the results of a request."""
    hooks = _hooks(worker)
    return None if hooks is None else hooks.take(key)


def prefetch_parameters(worker: Any, names: list[str]) -> list[str]:
    """For `collective_rpc`: keep whole parameters; returns names that no stage has."""
    hooks = _hooks(worker)
    with torch.inference_mode():
        return names if hooks is None else hooks.parameters.prefetch(names)


def clear_parameters(worker: Any) -> None:
    """For `collective_rpc`: drop the kept parameters."""
    hooks = _hooks(worker)
    if hooks is not None:
        hooks.parameters.clear()


def _hooks(worker: Any) -> WorkerHooks | None:
    hooks: WorkerHooks | None = worker.model_runner.residual.hooks
    return hooks

# SPDX-License-Identifier: Apache-2.0
"""Worker calls of the engine core for hook functions."""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.hooks.worker.worker import WorkerHooks

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.steering.worker.worker import WorkerSteering


def open_hooks(
    vllm_config: "VllmConfig", model: nn.Module, steering: "WorkerSteering | None"
) -> WorkerHooks | None:
    """Create the hook functions of a worker; None if requests cannot have any."""
    if steering is None or not vllm_config.steering_config.hooks:
        return None
    reports = get_tensor_model_parallel_rank() == 0
    return WorkerHooks(model, steering.program_addresses, reports)


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

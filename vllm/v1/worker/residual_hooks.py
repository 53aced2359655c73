# SPDX-License-Identifier: Apache-2.0
"""Worker calls of the engine core for hook functions."""

from typing import TYPE_CHECKING

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

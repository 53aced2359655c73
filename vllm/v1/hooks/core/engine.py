# SPDX-License-Identifier: Apache-2.0
"""The engine core's calls for hook functions, which front ends make by name."""

from typing import TYPE_CHECKING, Any

import torch

from vllm.v1.hooks.worker.worker import WorkerHooks

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore


def take_hook_results(core: "EngineCore", key: str) -> list[bytes | None]:
    """Take a request's results from each worker, where they are removed."""
    found: list[bytes | None] = core.model_executor.collective_rpc(
        take_results, args=(key,)
    )
    return found


def prefetch_parameters(core: "EngineCore", names: list[str]) -> list[str]:
    """Keep whole parameters in every worker; returns the unknown names."""
    missing: list[list[str]] = core.model_executor.collective_rpc(
        prefetch_parameters_on_rank, args=(names,)
    )
    return missing[0]


def clear_parameters(core: "EngineCore") -> None:
    """Drop the kept parameters."""
    core.model_executor.collective_rpc(clear_parameters_on_rank)


# What workers run, by `collective_rpc`: sent by name, so they stay at module level.


def take_results(worker: Any, key: str) -> bytes | None:
    """For `collective_rpc`: remove and return the results of a request."""
    return _hooks(worker).take(key)


def prefetch_parameters_on_rank(worker: Any, names: list[str]) -> list[str]:
    """For `collective_rpc`: keep whole parameters; returns names that no stage has."""
    with torch.inference_mode():
        return _hooks(worker).parameters.prefetch(names)


def clear_parameters_on_rank(worker: Any) -> None:
    """For `collective_rpc`: drop the kept parameters."""
    _hooks(worker).parameters.clear()


def _hooks(worker: Any) -> WorkerHooks:
    hooks: WorkerHooks = worker.model_runner.residual.hooks
    return hooks

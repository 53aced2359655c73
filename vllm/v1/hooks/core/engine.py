# SPDX-License-Identifier: Apache-2.0
"""The engine core's calls for hook functions, which front ends make by name."""

from typing import TYPE_CHECKING

from vllm.v1.hooks.worker import calls

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore


def take_hook_results(core: "EngineCore", key: str) -> list[bytes | None]:
    """Take a request's results from each worker, where they are removed."""
    found: list[bytes | None] = core.model_executor.collective_rpc(
        calls.take_results, args=(key,)
    )
    return found


def prefetch_parameters(core: "EngineCore", names: list[str]) -> list[str]:
    """Keep whole parameters in every worker; returns the unknown names."""
    missing: list[list[str]] = core.model_executor.collective_rpc(
        calls.prefetch_parameters, args=(names,)
    )
    return missing[0]


def clear_parameters(core: "EngineCore") -> None:
    """Drop the kept parameters."""
    core.model_executor.collective_rpc(calls.clear_parameters)

# SPDX-License-Identifier: Apache-2.0
"""Readouts in the engine core: what its methods of the same names do."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore


def load_module(
    core: "EngineCore", name: str, path: str, tap: tuple[int, str] | None = None
) -> None:
    """Load a module on all ranks; on none if one of them cannot."""
    from vllm.v1.worker import residual_stream

    place = None if tap is None else (int(tap[0]), str(tap[1]))
    rpc = core.model_executor.collective_rpc
    try:
        rpc(residual_stream.load_module, args=(name, path, place))
    except Exception:
        rpc(residual_stream.unload_module, args=(name,))
        raise


def unload_module(core: "EngineCore", name: str) -> None:
    """Forget a module on all ranks."""
    from vllm.v1.worker import residual_stream

    core.model_executor.collective_rpc(residual_stream.unload_module, args=(name,))


def status(core: "EngineCore") -> dict[str, Any]:
    """Rows that were read out, and the processor's seconds, by kind, over ranks."""
    from vllm.v1.worker import residual_stream

    total: dict[str, dict[str, float]] = {}
    for rank in core.model_executor.collective_rpc(residual_stream.readout_counters):
        for kind, counts in rank.items():
            own = total.setdefault(kind, {"rows": 0, "seconds": 0.0})
            for name, value in counts.items():
                own[name] += value
    return total

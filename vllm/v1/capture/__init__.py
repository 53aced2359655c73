# SPDX-License-Identifier: Apache-2.0
"""Activation capture: rows of the residual stream, delivered to pluggable consumers.

Exports the names that plug-ins import. Each is imported on first access, so importing
this package alone is cheap.
"""

from importlib import import_module
from typing import Any

_TYPES = "vllm.v1.capture.types"
_EXPORTS = {
    **dict.fromkeys(
        (
            *("CaptureChunk", "CaptureContext", "CaptureFinalize", "CaptureKey"),
            *("CaptureResult", "CaptureSpec", "CaptureStatus", "HookName"),
            *("PositionSelector", "VllmInternalRequestId"),
            *("capture_expert_parallel_size", "captured_prompt_positions"),
            *("min_captured_prompt_position", "spec_touches_prompt"),
        ),
        _TYPES,
    ),
    "CaptureConsumer": "vllm.v1.capture.consumer",
    "SteeringController": "vllm.v1.capture.controller",
    "SyncCaptureConsumer": "vllm.v1.capture.sync",
    "CaptureSink": "vllm.v1.capture.sink",
    "CaptureValidationError": "vllm.v1.capture.errors",
    "UnknownCaptureConsumerError": "vllm.v1.capture.errors",
}

__all__ = sorted(_EXPORTS)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)

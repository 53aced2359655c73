# SPDX-License-Identifier: Apache-2.0
"""What the engine core calls in workers for captures, by `collective_rpc`.

Each function gets the worker. They are sent by name, so they stay at module level.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

from vllm.v1.residual.capture_plan import CaptureEnd
from vllm.v1.residual.point_shapes import Shapes

HookPoints: TypeAlias = dict[int, tuple[str, ...]]


def facts_of(
    worker: Any,
) -> tuple[HookPoints, Shapes, dict[str, int], dict[str, str]]:
    """For `collective_rpc`: hook points, their shapes, staging memory, what lacks."""
    residual = worker.model_runner.residual
    shapes, staging = residual.point_shapes, residual.staging
    return residual.hook_points, shapes, staging, residual.missing


def readout_refusals_of(worker: Any) -> dict[str, Any]:
    """For `collective_rpc`: what a worker's layers and head do not support.

    As `Refusals`, with the keys that the worker knows.
    """
    readouts = worker.model_runner.residual.readouts
    refusals: dict[str, Any] = {} if readouts is None else readouts.refusals
    return refusals


def set_hook_points(worker: Any, points: HookPoints, shapes: Shapes) -> None:
    """For `collective_rpc`: set the hook points of all layers, over all stages."""
    config = worker.vllm_config.capture_config
    config.hook_points, config.point_shapes = points, shapes


def end_captures(worker: Any, ends: Sequence[CaptureEnd]) -> None:
    """For `collective_rpc`: end captures while the engine runs no step."""
    worker.model_runner.residual.end_captures(ends)


def report_captures_to(worker: Any, address: str) -> None:
    """For `collective_rpc`: report counters to the front end at `address`."""
    worker.model_runner.residual.report_captures_to(address)

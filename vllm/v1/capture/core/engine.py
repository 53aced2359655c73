# SPDX-License-Identifier: Apache-2.0
"""Capture in the engine core: what its methods of the same names do."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from vllm.logger import init_logger
from vllm.v1.capture.plan import CaptureEnd

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore

logger = init_logger(__name__)


def end_captures(core: "EngineCore", ends: Sequence[Any]) -> None:
    """Requests have ended for the client: tell the workers, after their steps.

    While the engine runs steps the next one carries the message, so that nothing
    waits; an idle engine is told at once.
    """
    decoded = [
        end if isinstance(end, CaptureEnd) else msgspec.convert(end, CaptureEnd)
        for end in ends
    ]
    capture = core.scheduler.capture  # type: ignore[attr-defined]
    own = [end for end in decoded if capture.forget(end.request_id)]
    if core.scheduler.has_requests():
        capture.add_ends(own)
    elif own:
        end_captures_now(core, own)


def end_captures_now(core: "EngineCore", ends: Sequence[CaptureEnd]) -> None:
    """As `end_captures`, where no further step may follow.

    A core in the process of its front end runs steps only as long as requests
    are unfinished for the latter.
    """
    from vllm.v1.worker import residual_stream

    core.model_executor.collective_rpc(residual_stream.end_captures, args=(ends,))


def deliver_ends(core: "EngineCore") -> None:
    """The engine stops: tell the workers of the ends that wait for a step."""
    scheduler = getattr(core, "scheduler", None)
    capture = getattr(scheduler, "capture", None)
    ends = None if capture is None else capture.take_ends()
    if not ends:
        return
    try:
        end_captures_now(core, ends)
    except Exception:
        logger.exception("%d requests lose their captures: no worker", len(ends))


def introduce_capture(core: "EngineCore", address: str) -> None:
    """A front end that listens at `address` wants to hear of all captures."""
    from vllm.v1.worker import residual_stream

    core.model_executor.collective_rpc(
        residual_stream.report_captures_to, args=(address,)
    )


def note_hook_points(core: "EngineCore") -> None:
    """Put the loaded model's hook points, over all stages, into the configuration."""
    from vllm.v1.worker import residual_stream

    stages = core.model_executor.collective_rpc(residual_stream.hook_points_of)
    points = {layer: points for stage in stages for layer, points in stage.items()}
    config = core.vllm_config.capture_config
    config.hook_points = points
    if config.enabled:
        core.model_executor.collective_rpc(
            residual_stream.set_hook_points, args=(points,)
        )

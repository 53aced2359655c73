# SPDX-License-Identifier: Apache-2.0
"""The bodies of the methods that capture adds to the engine core."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from vllm.logger import init_logger
from vllm.v1.residual.capture_plan import CaptureEnd
from vllm.v1.residual.tap import Shapes

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore


logger = init_logger(__name__)


def end_captures(core: "EngineCore", ends: Sequence[Any]) -> None:
    """Send the ends of requests to the workers, after the steps of these requests.

    If the engine has requests, the ends are sent with the next step, otherwise at once.

    Args:
        core: the engine core.
        ends: `CaptureEnd`s, decoded or not.

    """
    decoded = [
        end if isinstance(end, CaptureEnd) else msgspec.convert(end, CaptureEnd)
        for end in ends
    ]
    own = _own(core, decoded)
    if core.scheduler.has_requests():
        core.scheduler.residual.capture.add_ends(own)  # type: ignore[attr-defined]
    elif own:
        _send(core, own)


def end_captures_now(core: "EngineCore", ends: Sequence[CaptureEnd]) -> None:
    """Send the ends of requests to the workers at once, without waiting for a step.

    Needed if there may be no further step: a core in the process of its front end only
    runs while the front end has unfinished requests.
    """
    _send(core, _own(core, ends))


def _own(core: "EngineCore", ends: Sequence[CaptureEnd]) -> list[CaptureEnd]:
    """The ends of this engine's requests."""
    scheduling: Any = core.scheduler.residual.capture  # type: ignore[attr-defined]
    return [end for end in ends if scheduling.ended(end.request_id)]


def _send(core: "EngineCore", ends: Sequence[CaptureEnd]) -> None:
    core.model_executor.collective_rpc(end_captures_on_rank, args=(ends,))


def deliver_ends(core: "EngineCore") -> None:
    """When the engine stops, send the ends that still wait for a step."""
    scheduler = getattr(core, "scheduler", None)  # None if it did not start.
    ends = None if scheduler is None else scheduler.residual.capture.take_ends()
    if not ends:
        return
    try:
        _send(core, ends)
    except Exception:
        logger.exception("%d requests lose their captures: no worker", len(ends))


def introduce_capture(core: "EngineCore", address: str) -> None:
    """Have all workers report their counters to the front end at `address`."""
    core.model_executor.collective_rpc(report_captures_to, args=(address,))


def note_model(core: "EngineCore") -> None:
    """Collect facts about the loaded model from all stages into the configuration.

    They are its hook points, the ranks' staging memory, and what readouts cannot read.
    If capture is enabled, the workers get the full map of hook points as well.
    """
    ranks = core.model_executor.collective_rpc(facts_of)
    points = {layer: own for rank, *_ in ranks for layer, own in rank.items()}
    shapes = {layer: own for _, rank, *_ in ranks for layer, own in rank.items()}
    config = core.vllm_config.capture_config
    config.hook_points, config.point_shapes = points, shapes
    config.staging = [staging for _, _, staging, *_ in ranks]
    having = {name for own in points.values() for name in own}
    for _, _, _, missing, _ in ranks:
        config.missing |= {n: why for n, why in missing.items() if n not in having}
    if core.vllm_config.readout_config.enabled:
        refusals: dict[str, Any] = {"attention": {}}
        for *_, own in ranks:
            refusals["attention"] |= own.pop("attention", {})
            refusals |= {name: refusals.get(name) or why for name, why in own.items()}
        core.vllm_config.readout_config.refusals = refusals
    if config.enabled:
        core.model_executor.collective_rpc(set_hook_points, args=(points, shapes))


# What workers run, by `collective_rpc`: sent by name, so they stay at module level.

HookPoints: TypeAlias = dict[int, tuple[str, ...]]


def facts_of(
    worker: Any,
) -> tuple[HookPoints, Shapes, dict[str, int], dict[str, str], dict[str, Any]]:
    """For `collective_rpc`: hook points, their shapes, staging memory, what lacks.

    And what the layers and the head do not support of readouts, as `Refusals`, with the
    keys that the worker knows.
    """
    residual = worker.model_runner.residual
    readouts = residual.readouts
    refusals: dict[str, Any] = {} if readouts is None else readouts.refusals
    shapes, staging = residual.point_shapes, residual.staging
    return residual.hook_points, shapes, staging, residual.missing, refusals


def set_hook_points(worker: Any, points: HookPoints, shapes: Shapes) -> None:
    """For `collective_rpc`: set the hook points of all layers, over all stages."""
    config = worker.vllm_config.capture_config
    config.hook_points, config.point_shapes = points, shapes


def end_captures_on_rank(worker: Any, ends: Sequence[CaptureEnd]) -> None:
    """For `collective_rpc`: end captures while the engine runs no step."""
    worker.model_runner.residual.end_captures(ends)


def report_captures_to(worker: Any, address: str) -> None:
    """For `collective_rpc`: report counters to the front end at `address`."""
    worker.model_runner.residual.report_captures_to(address)

# SPDX-License-Identifier: Apache-2.0
"""What consumers that run within the step see of every request."""

from bisect import bisect_right
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vllm.v1.capture.errors import CaptureValidationError, fail
from vllm.v1.capture.registry import build_consumer
from vllm.v1.residual.readout_plan import Readout, ReadoutPlan
from vllm.v1.residual.row_selection import (
    CaptureContext,
    CaptureSpec,
    parse_taps,
)
from vllm.v1.residual.selectors import resolve_positions
from vllm.v1.residual.sizes import stage_starts
from vllm.v1.residual.tap import Tap, width_at

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class StepSpecs:
    """The specs of these consumers, by the consumer's name.

    Their rows stay on the device, as those of readouts do.
    """

    def __init__(self, vllm_config: "VllmConfig") -> None:
        """Ask the configured consumers."""
        self._specs = {
            one.instance_name: build_consumer(one, vllm_config).global_capture_spec()
            for one in vllm_config.capture_config.step_consumers
        }
        self._starts = stage_starts(vllm_config) if self._specs else []

    def __bool__(self) -> bool:
        return bool(self._specs)

    def check(self, ctx: CaptureContext) -> None:
        """Refuse consumers whose rows no rank has, at the start.

        Args:
            ctx: the model's dimensions.

        Raises:
            CaptureValidationError: a hook point does not exist, or several stages have
                the consumer's layers.

        """
        for name, spec in self._specs.items():
            layers = sorted({layer for layer, _ in _taps(name, spec, ctx)})
            if len({bisect_right(self._starts, layer) for layer in layers}) > 1:
                raise CaptureValidationError(
                    f"capture consumer {name!r} sees layers {layers}, which are in "
                    "several pipeline stages, and runs in one; name layers of one of "
                    f"the stages, which begin at layers {self._starts}",
                    parameter="capture_consumers",
                    value=name,
                )

    def added(self, plan: ReadoutPlan | None, ctx: CaptureContext) -> ReadoutPlan:
        """The plan of a request's readouts, with what these consumers see of it."""
        plan = ReadoutPlan(()) if plan is None else plan
        steps = [self._readout(name, spec, ctx) for name, spec in self._specs.items()]
        return replace(plan, readouts=(*plan.readouts, *steps))

    def _readout(self, name: str, spec: CaptureSpec, ctx: CaptureContext) -> Readout:
        where = f"capture consumer {name!r}"
        return Readout(
            f"step:{name}",
            "custom",
            _taps(name, spec, ctx),
            resolve_positions(spec.positions, ctx, where, fail),
            name,
            step=True,
        )


def _taps(name: str, spec: CaptureSpec, ctx: CaptureContext) -> tuple[Tap, ...]:
    """The hook points that a consumer sees."""
    hooks = {str(hook): list(layers) for hook, layers in spec.hooks.items()}
    where = f"capture consumer {name!r}"
    taps = parse_taps(hooks, ctx, where, fail)
    for tap in taps:
        width = width_at(ctx.point_shapes, ctx.hidden_size, tap)
        if width != ctx.hidden_size:
            raise fail(
                f"{where}: rows of {tap[1]} have {width} numbers, and within a step "
                f"only rows as wide as the stream ({ctx.hidden_size}) are taken; "
                f"capture {tap[1]} by another consumer",
                where,
                tap[1],
            )
    return taps

# SPDX-License-Identifier: Apache-2.0
"""Monitors: a probe gates what consumers add, token by token, as `when` does."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from vllm.v1.residual.steering_actions import SteeringMonitorUpdate
from vllm.v1.residual.tap import Tap
from vllm.v1.steering.conditions import Condition, is_known_at
from vllm.v1.steering.operations import Details, operation
from vllm.v1.steering.plan import PackedVectors, Vector, pack

EVEN = 0.5
"""The gate of a monitor without slope: the sigmoid of 0."""


class Monitor(NamedTuple):
    """The gate `sigmoid(sharpness (x . probe - threshold))`."""

    condition: Condition
    gate_rows: bool
    """Whether it also gates the overrides that have no monitor of their own."""

    def check(self, taps: Iterable[Tap]) -> None:
        """Refuse to gate what acts before the probe reads.

        Raises:
            ValueError: a vector is at such a hook point.

        """
        for tap in taps:
            if not is_known_at(self.condition.tap, tap):
                layer, hook = self.condition.tap
                raise ValueError(
                    f"the monitor at {hook} of layer {layer} decides after the vector "
                    f"at {tap[1]} of layer {tap[0]}; place it at or before all vectors"
                )


def monitor_of(update: SteeringMonitorUpdate) -> Monitor | None:
    """The monitor that a checked update sets; None if it removes one."""
    if update.probe is None:
        return None
    condition = Condition(
        layer=update.layer,
        hook=update.hook,
        probe=update.probe.astype("<f4").tobytes(),
        bias=0.0,
        cosine=False,
        above=True,
        threshold=update.threshold,
        sharpness=update.sharpness,
        scope="token",
        name="",
    )
    return Monitor(condition, update.gate_rows)


def pack_gated(
    vectors: Mapping[Tap, Vector], monitor: Monitor | None
) -> PackedVectors | None:
    """Additions at each token, gated by a monitor; None if nothing is added."""
    if monitor is None:
        return pack(vectors)
    if monitor.condition.sharpness == 0:
        return pack({tap: np.float32(EVEN) * one for tap, one in vectors.items()})
    details = Details(when=monitor.condition)
    operations = [
        operation(tap, "add", vector, 1.0, (None, None), False, None, details)
        for tap, vector in sorted(vectors.items(), key=lambda item: item[0])
        if vector.any()
    ]
    return pack({}, operations)

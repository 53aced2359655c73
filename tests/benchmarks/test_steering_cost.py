# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of the steering benchmarks, and the time to set up a request."""

import pytest

from benchmarks.harness.admission_time import measure_admission
from benchmarks.harness.served import Cost
from benchmarks.steering_cost import Load, Round, bodies, ratios


def a_round(off: float, steered: float) -> Round:
    modes = {"off": off, "idle": off, "one": off, "all": steered}
    return {mode: [Cost(s, 2 * s), Cost(s, 2 * s)] for mode, s in modes.items()}


def test_a_start_that_favours_one_side_cancels_out() -> None:
    # Steering costs a tenth; in one start its process is twice as fast.
    starts = [[a_round(10, 5.5)] * 3, [a_round(5, 11)] * 3]
    for clock in ("wall", "cpu"):
        found = ratios(starts, clock)
        assert found["all"]["median"] == pytest.approx(1.1)
        assert found["idle"]["median"] == found["control"]["median"] == 1


@pytest.mark.parametrize(("mode", "names"), [("idle", 0), ("one", 1), ("all", 16)])
def test_modes_steer_as_they_say(mode: str, names: int) -> None:
    sent = bodies(Load(), mode)
    assert len(sent) == 16
    assert len({body.get("steering_name") for body in sent} - {None}) == names


def test_every_way_to_steer_has_its_set_up_timed() -> None:
    times = measure_admission(requests=10)
    assert all(len(times[what]) == 10 for what in ("plain", "named", "packed"))

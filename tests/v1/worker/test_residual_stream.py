# SPDX-License-Identifier: Apache-2.0
"""Idle steps are skipped without changing the results of later ones."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.model_executor.layers.residual.capture_op import Launch
from vllm.v1.worker.residual_graph_choice import GraphFamilies
from vllm.v1.worker.residual_graphs import NOTHING
from vllm.v1.worker.residual_stream import OpenResidualStream

CAPTURES, STEERS = frozenset({1}), frozenset({2})
pytestmark = pytest.mark.usefixtures("no_engine")


class Feature:
    """A stand-in for capture or steering, with memory that a pass reads."""

    def __init__(self, ops: frozenset[int]) -> None:
        self.ops = ops
        self.wanted = False
        self.memory = self.planned = NOTHING
        self.calls = 0
        self.readouts, self.staging_facts = None, {}

    @property
    def is_idle(self) -> bool:
        return not self.wanted

    def plan_step(self, view: Any) -> frozenset[int]:
        self.calls += 1
        self.planned = self.ops if self.wanted else NOTHING
        return self.planned

    def begin_step(self, num_rows: int = 0) -> None:
        self.calls += 1
        self.memory = self.planned

    def end_step(self, attention: Any = None) -> None:
        self.calls += 1
        self.planned = NOTHING


class Bench:
    """A stream for running steps and dummy passes."""

    def __init__(self) -> None:
        self.capture, self.steering = Feature(CAPTURES), Feature(STEERS)
        capture: Any = self.capture
        steering: Any = self.steering
        families = [NOTHING, CAPTURES | STEERS]
        graphs = GraphFamilies(families, may_record=False)
        self.stream = OpenResidualStream({}, capture, steering, graphs)
        self.views = 0

    def _view(self) -> Any:
        self.views += 1
        return SimpleNamespace(req_ids=())

    def run(self, is_step: bool = True, goes_on: bool = True) -> tuple[Any, ...]:
        """Run a pass, a dummy pass, or a step without a pass; returns what it reads."""
        if is_step:
            self.stream.plan_step(self._view)
        if not goes_on:
            return ()
        self.stream.begin_step(4)
        found = Launch.taps, self.capture.memory, self.steering.memory
        self.stream.end_step(None)
        return *found, Launch.taps


def test_a_step_is_not_looked_at_when_nothing_is_to_be_done_again() -> None:
    bench = Bench()
    for _ in range(5):
        assert bench.run() == (NOTHING,) * 4
    assert (bench.views, bench.capture.calls, bench.steering.calls) == (1, 3, 3)


@given(
    st.lists(
        st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans()),
        max_size=12,
    )
)
def test_a_pass_finds_what_its_step_wants(events: list[tuple[bool, ...]]) -> None:
    bench = Bench()
    for captures, steers, is_step, goes_on in events:
        if is_step:
            bench.capture.wanted, bench.steering.wanted = captures, steers
        found = bench.run(is_step, goes_on)
        if not found:
            continue
        launched, in_capture, in_steering, after = found
        assert after == NOTHING
        if is_step:
            captured = CAPTURES if captures else NOTHING
            steered = STEERS if steers else NOTHING
            assert launched == captured | steered
            assert (in_capture, in_steering) == (captured, steered)

# SPDX-License-Identifier: Apache-2.0
"""Requests start and end while others continue, with different readers."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.v1.capture._simulation import Life, Step, lives, standing
from tests.v1.capture._sinks import WAIT
from tests.v1.capture._strategies import plan_for, positions, wanted
from tests.v1.capture._worker_bench import TAPS, Bench
from vllm.v1.capture.dispatch import dispatcher
from vllm.v1.residual.capture_plan import READOUTS, CapturePlan, group_taps
from vllm.v1.residual.spans import OPEN_END, Spans
from vllm.v1.residual.tap import Tap

pytestmark = pytest.mark.usefixtures("no_engine")
LAG = 2


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    """The reader `c` takes rows as soon as they are computed."""
    opened = Bench(truncating="c", page_every=5)
    yield opened
    opened.close()


@dataclass(eq=False)
class Visit:
    """A request with its captures, from its start to its end."""

    life: Life
    want: dict[str, dict[Tap, Spans]]
    stays: int
    """Number of other steps before its end is known."""
    name: str = ""

    def plan(self, drafts: bool) -> CapturePlan:
        prompt = self.life.num_prompt_tokens
        # Without consumers it is only read.
        want = self.want or {READOUTS: dict.fromkeys(TAPS, ((0, OPEN_END),))}
        groups = group_taps(want, prompt, LAG if drafts else 0)
        return msgspec.structs.replace(plan_for(want, prompt), groups=groups)

    def check(self, found: dict[Any, list[tuple[float, float]]]) -> None:
        for instance, taps in self.want.items():
            for tap, ranges in taps.items():
                rows = found.pop((self.name, instance, tap), [])
                kept = standing(self.life, positions(ranges, self.life.stop))
                expected = [(float(p), float(TAPS.index(tap))) for p in kept]
                if instance == "c":  # It gets invalid rows too, after the valid ones.
                    rows = rows[: len(expected)]
                if self.life.settled:
                    assert rows == expected
                else:  # Aborted during recomputation: held rows are lost.
                    assert rows == [row for row in expected if row in rows]


@dataclass(frozen=True)
class Event:
    """The engine's next action: new requests, a step, finished requests."""

    come: list[Visit]
    batch: list[tuple[Visit, Step, int]]
    """The step of each request, and the offset of its assumed positions."""
    go: list[Visit]


@st.composite
def traffic(draw: st.DrawFn, drafts: bool) -> list[Event]:
    """Up to three concurrent requests, from first steps to late ends.

    Everything is drawn before it is run, because hypothesis may stop in between.
    """
    instances = draw(st.sampled_from(["ab", "abc"]))
    coming = []
    for life in draw(st.lists(lives() | lives(0), min_size=2, max_size=8)):
        want = draw(wanted(life.num_prompt_tokens, life.stop + 2))
        want = {who: taps for who, taps in want.items() if who in instances}
        coming.append(Visit(life, want, draw(st.integers(0, 2))))
    here: list[tuple[Visit, list[Step]]] = []
    events: list[Event] = []
    while coming or here:
        room = max(draw(st.integers(1, 3)) - len(here), 0)
        come, coming = coming[:room], coming[room:]
        here += [(visit, list(visit.life.steps)) for visit in come]
        batch = []
        for visit, steps in here:
            if steps:
                generated = steps[0].start >= visit.life.num_prompt_tokens
                ahead = draw(st.integers(0, LAG)) if drafts and generated else 0
                batch.append((visit, steps.pop(0), ahead))
        going = [visit for visit, steps in here if not steps and visit.stays == 0]
        for visit, steps in here:
            visit.stays -= not steps
        here = [(visit, steps) for visit, steps in here if visit not in going]
        events.append(Event(come, batch, going))
    return events


@given(st.data(), st.booleans(), st.sampled_from([3, 128]))
def test_requests_that_come_and_go_get_their_rows(
    bench: Bench, data: st.DataObject, drafts: bool, steps_at_once: int
) -> None:
    events = data.draw(traffic(drafts))
    visits = [visit for event in events for visit in event.come]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatcher, "STEPS_AT_ONCE", steps_at_once)
        for event in events:
            for visit in event.come:
                visit.name = bench.new_name()
                bench.open(visit.name, visit.plan(drafts))
            if event.batch:
                ahead = [ahead for _, _, ahead in event.batch] if drafts else None
                steps = [
                    (v.name, step.start, step.values) for v, step, _ in event.batch
                ]
                bench.step(steps, ahead)
            bench.worker.end_reading([visit.name for visit in event.go])
            for visit in event.go:
                if visit.want:
                    bench.end(visit.name, visit.life)
    found = bench.collect(sum(len(visit.want) for visit in visits))
    for visit in visits:
        visit.check(found)
    assert not found, "rows that nobody asked for"
    assert not bench.worker._plans and bench.worker.is_idle
    assert not bench.worker._staging.ring._taken


def test_rows_of_others_wait_when_a_request_ends(bench: Bench) -> None:
    bench.worker._dispatcher.hand_on()  # So that the steps below are the first of many.
    want = {"a": {TAPS[0]: ((0, 1 << 40),)}}
    names = [bench.new_name() for _ in range(3)]
    for name in names:
        bench.open(name, plan_for(want, 1))
    for position in range(4):
        bench.step([(name, position, (float(position),)) for name in names])
    for left in (2, 1, 0):
        bench.end(names[left], Life(1, (), 5, 4))
        rows = bench.collect(1)
        assert list(rows.values()) == [[(float(p), 0.0) for p in range(4)]]
        assert bool(bench.worker._staging.ring._taken) == (left > 0)


def test_rows_that_are_wanted_at_once_do_not_hurry_those_of_others(
    bench: Bench,
) -> None:
    bench.worker._dispatcher.hand_on()  # So that the steps below are the first of many.
    live, other = bench.new_name(), bench.new_name()
    for name, instance in ((live, "c"), (other, "a")):
        bench.open(name, plan_for({instance: {TAPS[0]: ((0, 1 << 40),)}}, 1))
    for position in range(3):
        bench.step([(name, position, (float(position),)) for name in (live, other)])
        if position:  # The next row settles a row.
            message = bench.messages.get(timeout=WAIT)
            assert [chunk.request_id for chunk in message.chunks] == [live]
            ((row,),) = message.chunks[0].tensor.tolist()
            assert row == [position - 1, 0]
    assert len(bench.worker._staging.ring._taken) == 3
    bench.end(other, Life(1, (), 4, 3))
    assert list(bench.collect(1).values()) == [[(float(p), 0.0) for p in range(3)]]
    bench.end(live, Life(1, (), 4, 3))
    assert bench.messages.get(timeout=WAIT).chunks[0].row_offset == 2
    assert bench.collect(1) == {}


def test_the_engine_never_waits_for_room_that_only_waiting_rows_take() -> None:
    bench = Bench()
    ring = bench.worker._staging.ring
    want = {"a": dict.fromkeys(TAPS, ((0, 1 << 40),))}
    stays, comes = bench.new_name(), map(str, itertools.count())
    bench.open(stays, plan_for(want, 1))
    steps = 4 * ring.num_rows // len(TAPS)
    for position in range(steps):  # Far more rows than fit.
        name = next(comes)
        bench.open(name, plan_for(want, 1))
        bench.step([(stays, position, (float(position),)), (name, 0, (0.0,))])
        bench.end(name, Life(1, (), 2, 1))
    bench.end(stays, Life(1, (), steps + 1, steps))
    found = bench.collect(steps + 1)
    for number, tap in enumerate(TAPS):
        rows = [(float(position), float(number)) for position in range(steps)]
        assert found[stays, "a", tap] == rows
    bench.close()

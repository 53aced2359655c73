# SPDX-License-Identifier: Apache-2.0
"""Requests start and end while others continue, with different readers."""

import itertools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.v1.capture._simulation import Life, Step, lives, standing
from tests.v1.capture._sinks import WAIT
from tests.v1.capture._strategies import plan_for, positions, wanted
from tests.v1.capture._worker_bench import TAPS, Bench
from vllm.v1.capture.dispatch import dispatcher
from vllm.v1.capture.transport.zmq_channel import EndMessage
from vllm.v1.residual.capture_plan import READOUTS, CapturePlan, group_taps
from vllm.v1.residual.readout_plan import KeepWhen, ReadoutPlan, StopWhen
from vllm.v1.residual.spans import OPEN_END, Spans, contains, merged
from vllm.v1.residual.tap import Tap

pytestmark = pytest.mark.usefixtures("no_engine")
LAG = 2
EVERYTHING = ((0, OPEN_END),)


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    """The reader `c` takes rows as soon as they are computed."""
    opened = Bench(truncating="c", page_every=5)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def two_stages() -> Iterator[Bench]:
    """As `bench`, with two batches whose steps alternate."""
    opened = Bench(truncating="c", page_every=5, batches=2)
    yield opened
    opened.close()


@dataclass(eq=False)
class Visit:
    """A request with its captures, from its start to its end."""

    life: Life
    want: dict[str, dict[Tap, Spans]]
    stays: int
    """Number of other steps before its end is known."""
    keeps: dict[str, KeepWhen]
    """The rules of instances that keep some rows only."""
    fires: set[int]
    """The positions at which these fire."""
    name: str = ""

    def plan(self, drafts: bool) -> CapturePlan:
        prompt = self.life.num_prompt_tokens
        # Without consumers it is only read.
        want = self.want or {READOUTS: dict.fromkeys(TAPS, ((0, OPEN_END),))}
        groups = group_taps(want, prompt, LAG if drafts else 0)
        rules = ReadoutPlan((), keep_when=tuple(self.keeps.values()))
        plan = msgspec.structs.replace(plan_for(want, prompt), groups=groups)
        return msgspec.structs.replace(plan, readouts=rules) if self.keeps else plan

    def kept(self) -> dict[str, Spans]:
        """What its front end says at its end."""
        until = min(self.life.stop, self.life.computed)
        fired = [p for p in sorted(self.fires) if p < until]
        return {name: kept_by(keep, fired) for name, keep in self.keeps.items()}

    def told(self, step: Step) -> list[tuple[str, int, int]]:
        """What is told after one of its steps."""
        own = [p for p in self.fires if 0 <= p - step.start < len(step.values)]
        return [
            (self.name, *span)
            for position in own
            for keep in self.keeps.values()
            for span in kept_by(keep, [position])
        ]

    def check(self, found: dict[Any, list[tuple[float, float]]]) -> None:
        for instance, taps in self.want.items():
            for tap, ranges in taps.items():
                rows = found.pop((self.name, instance, tap), [])
                kept = standing(self.life, positions(ranges, self.life.stop))
                if instance in self.keeps:
                    spans = self.kept()[instance]
                    kept = [p for p in kept if contains(spans, p)]
                expected = [(float(p), float(TAPS.index(tap))) for p in kept]
                if instance == "c":  # It gets invalid rows too, after the valid ones.
                    rows = rows[: len(expected)]
                if self.life.settled:
                    assert rows == expected
                else:  # Aborted during recomputation: held rows are lost.
                    assert rows == [row for row in expected if row in rows]


def kept_by(keep: KeepWhen, fired: list[int]) -> Spans:
    """What a rule keeps if it fires at these positions."""
    if keep.scope == "request":
        return ((0, OPEN_END),) if fired else ()
    return merged((max(p - keep.before, 0), p + keep.after + 1) for p in fired)


@st.composite
def kept(draw: st.DrawFn, instances: Collection[str]) -> dict[str, KeepWhen]:
    """Rules of some instances that do not take rows at once."""
    found = {}
    for name in sorted(draw(st.sets(st.sampled_from("ab"))) & {*instances}):
        scope = draw(st.sampled_from(["token", "token", "request"]))
        window = draw(st.tuples(st.integers(0, 3), st.integers(0, 3)))
        window = window if scope == "token" else (0, 0)
        found[name] = KeepWhen(name, StopWhen("r", 0.0), scope, *window)
    return found


@dataclass(frozen=True)
class Event:
    """The engine's next action: new requests, a step, finished requests."""

    come: list[Visit]
    batch: list[tuple[Visit, Step, int]]
    """The step of each request, and the offset of its assumed positions."""
    go: list[Visit]
    late: int
    """Number of events before the step's values are known."""
    sleeps: bool
    """Whether rows must leave the device before the next event."""


@st.composite
def traffic(draw: st.DrawFn, kind: str) -> list[Event]:
    """Up to three concurrent requests of a batch, from first steps to late ends.

    Everything is drawn before it is run, because hypothesis may stop in between.
    """
    drafts, batches = kind == "drafts", 2 if kind == "batches" else 1
    instances = draw(st.sampled_from(["ab", "abc"]))
    coming = []
    kinds = lives(0) if batches > 1 else lives() | lives(0)
    for life in draw(st.lists(kinds, min_size=2, max_size=8)):
        want = draw(wanted(life.num_prompt_tokens, life.stop + 2))
        want = {who: taps for who, taps in want.items() if who in instances}
        keeps = {} if drafts or batches > 1 else draw(kept(want))
        if kind == "held":  # Many rows around many tokens.
            taps = draw(st.sets(st.sampled_from(TAPS), min_size=1, max_size=3))
            want = {"a": dict.fromkeys(sorted(taps), EVERYTHING)}
            window = draw(st.tuples(st.integers(0, 2), st.integers(0, 1)))
            keeps = {"a": KeepWhen("a", StopWhen("r", 0.0), "token", *window)}
        fires = draw(st.sets(st.integers(0, 20))) if keeps else set()
        coming.append(Visit(life, want, draw(st.integers(0, 2)), keeps, fires))
    here: list[tuple[Visit, list[Step]]] = []
    events: list[Event] = []
    while coming or here:
        room = max(batches * draw(st.integers(1, 3)) - len(here), 0)
        come, coming = coming[:room], coming[room:]
        here += [(visit, list(visit.life.steps)) for visit in come]
        batch = []
        # A request may move to the other batch when one before it has ended.
        for visit, steps in here[len(events) % batches :: batches]:
            if steps:
                generated = steps[0].start >= visit.life.num_prompt_tokens
                ahead = draw(st.integers(0, LAG)) if drafts and generated else 0
                batch.append((visit, steps.pop(0), ahead))
        going = [visit for visit, steps in here if not steps and visit.stays == 0]
        for visit, steps in here:
            visit.stays -= not steps
        here = [(visit, steps) for visit, steps in here if visit not in going]
        late, sleeps = draw(st.integers(0, 3)), draw(st.integers(0, 5)) == 0
        events.append(Event(come, batch, going, late, sleeps))
    return events


Tell: TypeAlias = tuple[Callable[[Any], None], Any]


def remember(told: list[Tell], said: Any, tell: Callable[[Any], None]) -> None:
    told.append((tell, said))


@pytest.mark.parametrize("kind", ["any", "drafts", "held", "batches"])
@given(st.data(), st.sampled_from([3, 128]))
def test_requests_that_come_and_go_get_their_rows(
    bench: Bench,
    two_stages: Bench,
    kind: str,
    data: st.DataObject,
    steps_at_once: int,
) -> None:
    drafts, bench = kind == "drafts", two_stages if kind == "batches" else bench
    events = data.draw(traffic(kind))
    tells: dict[int, list[Tell]] = {}
    visits = [visit for event in events for visit in event.come]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatcher, "STEPS_AT_ONCE", steps_at_once)
        for number, event in enumerate(events):
            for visit in event.come:
                visit.name = bench.new_name()
                bench.open(visit.name, visit.plan(drafts))
            if event.batch:
                ahead = [ahead for _, _, ahead in event.batch] if drafts else None
                steps = [
                    (v.name, step.start, step.values) for v, step, _ in event.batch
                ]
                said = [one for v, step, _ in event.batch for one in v.told(step)]
                told = tells.setdefault(number + event.late, [])
                readouts: Any = bench.worker.readouts
                readouts.tell = partial(remember, told, said)
                bench.step(steps, ahead)
            bench.worker.end_reading([visit.name for visit in event.go])
            for visit in event.go:
                if visit.want:
                    bench.end(visit.name, visit.life, visit.kept())
            for tell, said in tells.pop(number, []):
                tell(said)
            if event.sleeps:
                bench.worker.send()
        for tell, said in itertools.chain(*tells.values()):
            tell(said)
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


def keeping(fires: set[int], before: int, after: int, steps: int) -> Visit:
    """A request of so many steps that keeps rows of all taps around some tokens."""
    keep = KeepWhen("a", StopWhen("r", 0.0), "token", before, after)
    each = tuple(Step(position, (float(position),)) for position in range(steps))
    life, want = Life(1, each, steps, steps), {"a": dict.fromkeys(TAPS, EVERYTHING)}
    return Visit(life, want, 0, {"a": keep}, fires)


def test_rows_around_which_nothing_fires_stay_on_the_device() -> None:
    bench, tells = Bench(page_every=10**9), []
    staging: Any = bench.worker._staging
    copied: list[int] = []
    copy, pick = staging._copy, staging.pick_to_host

    def note_copies(copies: Any, *rest: Any) -> Any:
        copied.extend(one.host.shape[:2].numel() for one in copies)
        return copy(copies, *rest)

    def note_picks(picks: Any) -> Any:
        copied.extend(len(rows) for rows, _ in picks)
        return pick(picks)

    staging._copy, staging.pick_to_host = note_copies, note_picks
    readouts: Any = bench.worker.readouts
    readouts.tell = tells.append
    visits = [keeping({9}, 2, 1, 20), keeping(set(), 2, 1, 20)]
    other, num_taps = bench.new_name(), len(TAPS)
    for visit in visits:
        visit.name = bench.new_name()
        bench.open(visit.name, visit.plan(False))
    bench.open(other, plan_for({"b": {TAPS[0]: EVERYTHING}}, 1))
    for position in range(20):
        names = [other, *(visit.name for visit in visits)]
        bench.step([(name, position, (float(position),)) for name in names])
        if position >= 2:
            step = visits[0].life.steps[position - 2]
            tells[position - 2](visits[0].told(step))
    held = bench.worker._dispatcher.held
    assert len(held._steps) < 6, "rows that are settled take no room"
    for visit in visits:
        bench.end(visit.name, visit.life, visit.kept())
    bench.end(other, Life(1, (), 20, 19))
    found = bench.collect(3)
    assert [row[0] for row in found.pop((other, "b", TAPS[0]))] == list(range(20))
    for tap in TAPS:
        rows = found.pop((visits[0].name, "a", tap))
        assert rows == [(float(p), float(TAPS.index(tap))) for p in (7, 8, 9, 10)]
    assert not found and sum(copied) == 20 + 4 * num_taps
    bench.close()


@pytest.mark.parametrize("late", [0, 1, 3])
@pytest.mark.parametrize("before", [0, 1, 2])
def test_a_row_waits_for_as_many_tokens_as_its_rule_names(
    bench: Bench, before: int, late: int
) -> None:
    """Whether all decode or one has a prompt, and wherever rows must leave."""
    for with_prompt, leave in itertools.product((False, True), (*range(3, 9), 99)):
        visit, other = keeping({7}, before, 0, 12), keeping({7}, 0, 0, 12)
        for one in (visit, other):
            one.name = bench.new_name()
            bench.open(one.name, one.plan(False))
        tells: list[Tell] = []
        readouts: Any = bench.worker.readouts
        for step in visit.life.steps:
            readouts.tell = partial(remember, tells, visit.told(step))
            batch = [(visit.name, step.start, step.values)]
            if with_prompt:
                batch.append((other.name, 2 * step.start, step.values * 2))
            bench.step(batch)
            if len(tells) > late:
                tell, said = tells.pop(0)
                tell(said)
            if step.start == leave:
                bench.worker.send()
        bench.end(visit.name, visit.life, visit.kept())
        bench.end(other.name, other.life, {"a": ()})
        for tell, said in tells:
            tell(said)
        visit.check(found := bench.collect(2))
        assert not found


def test_what_was_dropped_before_a_readout_failed_is_said() -> None:
    bench, visit = Bench(), keeping(set(), 0, 0, 12)
    visit.name = bench.new_name()
    bench.open(visit.name, visit.plan(False))
    readouts: Any = bench.worker.readouts
    for position in range(12):
        failed = [(visit.name, 0, OPEN_END)] if position == 6 else []
        readouts.tell = lambda tell, failed=failed: tell(failed)
        bench.step([(visit.name, position, (float(position),))])
    bench.end(visit.name, visit.life, {"a": EVERYTHING})
    message = bench.messages.get(timeout=WAIT)
    while not isinstance(message, EndMessage):
        message = bench.messages.get(timeout=WAIT)
    for end in message.ends:
        assert end.sidecar["positions"] == list(range(6, 12))
        assert "6 of 12 rows were not dropped" in end.sidecar["capture_note"]
        assert "capture_error" not in end.sidecar
    bench.close()


def test_held_rows_leave_if_there_is_no_room_for_others() -> None:
    bench = Bench()
    steps = 3 * bench.worker._staging.ring.num_rows // len(TAPS)
    visit = keeping({5, steps // 2, steps - 3}, 1, 1, steps)
    visit.name = bench.new_name()
    bench.open(visit.name, visit.plan(False))
    for position in range(steps):  # Their values are never told.
        bench.step([(visit.name, position, (float(position),))])
    bench.end(visit.name, visit.life, visit.kept())
    visit.check(found := bench.collect(1))
    assert not found
    bench.close()


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

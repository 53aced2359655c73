# SPDX-License-Identifier: Apache-2.0
"""Staged steps become rows of requests: when, and their places, positions, order."""

import threading
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.capture.dispatch.dispatcher import (
    PACKET_BYTES,
    SEND_BYTES,
    STEPS_AT_ONCE,
    Dispatcher,
    DispatchThread,
)
from vllm.v1.capture.dispatch.row_buffer import RowBuffer, Rows
from vllm.v1.capture.dispatch.step_buffer import StagedStep, rows_in
from vllm.v1.capture.staging.ring import Segment, Staging
from vllm.v1.capture.staging.slot_mapping import slots_of
from vllm.v1.residual.row_blocks import LocalGroup
from vllm.v1.residual.step_layout import StepLayout
from vllm.v1.residual.step_view import StepView, TrueStarts

WIDTH, TAPS = 4, 3
EVERYTHING = ((0, 1 << 40),)


class Taken:
    """A request that keeps its rows."""

    def __init__(self, req_id: str) -> None:
        self.req_id = req_id
        self.rows: list[Rows] = []

        self._gathering = RowBuffer(TAPS, torch.float32, together=True)

    def gather(self, pieces: Any, copies: Any) -> Any:
        return [(0, rows) for rows in self._gathering.gather(pieces[0], 1000, copies)]

    def add(self, group: int, rows: Rows) -> dict[str, Any]:
        self.rows.append(rows)
        return {}


class Bench:
    """Steps whose rows encode their request, position and tap."""

    def __init__(self, names: list[str]) -> None:
        self.staging = Staging(256, WIDTH, torch.float32, torch.device("cpu"))
        self.thread = DispatchThread(self.staging, {}, PACKET_BYTES)
        self.placement = StepLayout(range(TAPS), 128)
        self.taken = {name: Taken(name) for name in names}
        self.number = {name: float(i) for i, name in enumerate(names)}
        taps = tuple((layer, "post_block") for layer in range(TAPS))
        for name, request in self.taken.items():
            self.placement.add(
                name, (LocalGroup(taps, tuple(range(TAPS)), EVERYTHING, ()),)
            )
            self.thread.requests[name] = request  # type: ignore[assignment]
        self.steps: list[StagedStep] = []
        self.numbers = count()

    def step(self, starts: dict[str, int]) -> None:
        """Run a step with one token per request."""
        names, count = list(starts), len(starts)
        ones = np.ones(count, dtype=np.int64)
        view = StepView(names, np.array(list(starts.values())), ones, count)
        placed = self.placement.place(view)
        assert placed is not None
        layout = placed.layout
        segment = self.staging.ring.reserve(layout.num_rows, timeout=5)
        assert segment is not None
        slots = slots_of(layout, range(TAPS), count)
        for row, name in enumerate(names):
            for tap in range(TAPS):
                slot = segment.start + int(slots[tap, row])
                self.staging.rows[slot] = torch.tensor(
                    [self.number[name], float(starts[name]), float(tap), 0.0]
                )
        self.steps.append(StagedStep(next(self.numbers), placed, segment, None))

    def send_pages(self) -> dict[str, torch.Tensor]:
        """Send one step whose rows are in pages of their requests."""
        (step,) = self.steps
        places, base = {}, step.segment.start
        for block in step.placed.layout.blocks:
            taps = len(block.columns)
            rows = self.staging.rows[base : base + taps * block.num_rows]
            by_tap = rows.unflatten(0, (taps, block.num_rows))
            for req_id, group, position, num_rows, offset in rows_in(block, step):
                memory = by_tap[:, offset : offset + num_rows].clone()
                places[req_id, group, position] = memory, 0
            rows.fill_(-1.0)
            base += taps * block.num_rows
        self.steps = [step._replace(places=places)]
        self.send()
        return {req_id: memory for (req_id, *_), (memory, _) in places.items()}

    def send(self, copied: Any = None, hand_on: bool = True) -> None:
        """Send all steps so far to the thread, and wait for it."""
        done = threading.Event()
        work = self.thread.hand_on if hand_on else int
        self.thread.put([(self.steps, copied)], work)
        self.thread.put([], done.set)
        assert done.wait(10)
        self.steps = []

    def check(self, expected: dict[str, list[int]]) -> None:
        """Check each request's rows: these positions, in order, at every tap."""
        for name, positions in expected.items():
            rows = self.taken[name].rows
            found = [p for part in rows for p in range(part.start, part.stop)]
            assert found == positions
            together = torch.cat([part.tensor for part in rows], dim=1)
            for tap in range(TAPS):
                wanted = [[self.number[name], p, tap, 0] for p in positions]
                assert together[tap].tolist() == wanted
        self.thread.requests.clear()
        self.thread.close(5)
        assert not self.staging.ring._taken


@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=1, max_size=3),
)
def test_steps_that_continue_each_other_give_the_same_rows(
    count: int, batches: list[tuple[int, bool]]
) -> None:
    names = [f"r{i}" for i in range(count)]
    bench, position = Bench(names), 0
    for steps, hand_on in batches:
        for _ in range(steps):
            bench.step({name: 10 * i + position for i, name in enumerate(names)})
            position += 1
        bench.send(hand_on=hand_on)
    bench.send()
    bench.check(
        {n: list(range(10 * i, 10 * i + position)) for i, n in enumerate(names)}
    )


def test_rows_that_nobody_keeps_are_not_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench, copied = Bench(["a", "b"]), []
    for position in range(5):
        bench.step({"a": position, "b": position})
    bench.send(hand_on=False)
    gather = Taken.gather

    def note(self: Taken, pieces: Any, copies: Any) -> Any:
        copied.append(self.req_id)
        return gather(self, pieces, copies)

    monkeypatch.setattr(Taken, "gather", note)
    for name, keeps in (("a", False), ("b", True)):
        request: Any = bench.thread.requests[name]
        request.keeps_rows = lambda _, keeps=keeps: keeps
        request.finish = lambda *_: ({}, {})
    ends: Any = [(SimpleNamespace(request_id=name), None) for name in "ab"]
    bench.thread.put([], partial(bench.thread.finish, ends))
    bench.send(hand_on=False)
    assert copied == ["b"]
    bench.thread.close(5)
    assert not bench.staging.ring._taken, "all memory of the steps is free"


def test_rows_are_settled_by_the_steps_behind_them() -> None:
    bench = Bench(["a"])
    for position in range(5):
        bench.step({"a": position})
    bench.send()
    (rows,) = bench.taken["a"].rows
    assert rows[:2] == (0, 5) and (rows.step_before, rows.step) == (3, 4)
    bench.check({"a": list(range(5))})


def test_rows_wait_until_they_are_handed_on() -> None:
    bench = Bench(["a", "b"])
    for position in range(3):
        bench.step({"a": position, "b": 4 + position})
        bench.send(hand_on=False)
    assert bench.taken["a"].rows == bench.taken["b"].rows == []
    assert len(bench.staging.ring._taken) == 3
    bench.step({"b": 7})
    bench.send()
    (rows,) = bench.taken["b"].rows
    assert rows[:2] == (4, 4) and (rows.step_before, rows.step) == (2, 3)
    bench.check({"a": [0, 1, 2], "b": [4, 5, 6, 7]})


def test_steps_whose_copy_fails_are_lost_alone() -> None:
    def fail() -> None:
        raise RuntimeError("the device is gone")

    bench = Bench(["a"])
    for position in range(6):
        bench.step({"a": position})
        failing = SimpleNamespace(synchronize=fail) if position in (2, 3) else None
        bench.send(failing, hand_on=False)
    bench.send()
    bench.check({"a": [0, 1, 4, 5]})


def test_rows_that_cannot_be_taken_give_their_memory_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(["a"])
    with monkeypatch.context() as patch:
        patch.setattr(bench.taken["a"], "gather", None)
        bench.step({"a": 0})
        bench.send()
    assert not bench.staging.ring._taken
    bench.step({"a": 1})
    bench.send()
    bench.check({"a": [1]})


def test_a_request_that_is_not_known_is_skipped() -> None:
    bench = Bench(["a", "b"])
    bench.thread.put([], lambda: bench.thread.requests.pop("a", None))
    bench.step({"a": 0, "b": 0})
    bench.send()
    assert bench.taken["a"].rows == []
    bench.check({"b": [0]})


def test_a_page_is_handed_on_as_it_is() -> None:
    bench = Bench(["a", "b"])
    bench.step({"a": 3, "b": 8})
    pages = bench.send_pages()
    bench.step({"a": 4, "b": 9})
    bench.send()
    for name in "ab":
        assert bench.taken[name].rows[0].memory.data_ptr() == pages[name].data_ptr()
    bench.check({"a": [3, 4], "b": [8, 9]})


class EndingRequest:
    """A stand-in for a request with a few last rows; one without rows is broken."""

    def __init__(self, name: str, num_bytes: int) -> None:
        self.name, self.num_bytes = name, num_bytes

    def finish(self, end: Any, answer: Any) -> Any:
        assert self.num_bytes, f"{self.name} is broken"
        rows = torch.zeros(1, self.num_bytes, dtype=torch.uint8)
        chunk = SimpleNamespace(name=self.name, tensor=rows)
        return {"a": [chunk]}, {"a": self.name, "b": self.name}


class RecordingLane:
    """A lane that keeps its items, in order."""

    def __init__(self) -> None:
        self.items: list[Any] = []

    def submit(self, chunks: Any) -> None:
        self.items.append([chunk.name for chunk in chunks])

    def finish(self, ending: str) -> None:
        self.items.append(ending)


@given(st.lists(st.integers(0, 9), max_size=8), st.integers(1, 20))
def test_requests_that_end_together_share_packets_of_a_bounded_size(
    sizes: list[int], packet_bytes: int
) -> None:
    lanes: Any = {"a": RecordingLane(), "b": RecordingLane()}
    staging = Staging(1, WIDTH, torch.float32, torch.device("cpu"))
    dispatcher = Dispatcher(staging, lanes, packet_bytes)
    requests = {f"r{i}": EndingRequest(f"r{i}", size) for i, size in enumerate(sizes)}
    for request in requests.values():
        request.req_id = request.name  # type: ignore[attr-defined]
        dispatcher.open(request)  # type: ignore[arg-type]
    ends: Any = [(SimpleNamespace(request_id=name), None) for name in requests]
    dispatcher.end(ends)
    dispatcher.close(5)
    sound = [name for name, request in requests.items() if request.num_bytes]
    assert lanes["b"].items == sound
    packet: list[str] = []
    seen: list[str] = []
    for item in lanes["a"].items:
        if isinstance(item, list):
            assert not packet, "a packet's requests end before the next packet"
            packet, size = list(item), sum(requests[n].num_bytes for n in item)
            assert size - requests[item[-1]].num_bytes < packet_bytes
        else:
            assert packet.pop(0) == item
            seen.append(item)
    assert seen == sound and not packet


RING = 80 * STEPS_AT_ONCE


class HeardThread:
    """A stand-in for the thread, which frees the memory of steps it hands on."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._segments: list[Segment] = []
        self.calls: list[Any] = []

    def put(self, sent: Any, work: Any) -> None:
        for steps, *_ in sent:
            self._segments += [step.segment for step in steps]
            self.calls.append(len(steps))
        work()

    def hand_on(self, req_ids: tuple[str, ...] | None = None) -> None:
        self.calls.append("all" if req_ids is None else req_ids)
        if req_ids is None:
            self._staging.ring.release(*self._segments)
            self._segments = []


class Sending:
    """Steps of so many decoding requests, with an irrelevant layout."""

    def __init__(self, ring: int = RING, requests: int = 0) -> None:
        self._decoding = dict.fromkeys(range(requests))
        self.staging = Staging(ring, 1, torch.float32, torch.device("cpu"))
        self.dispatcher = Dispatcher(self.staging, {})
        self.dispatcher._thread.close(5)
        self.thread: Any = HeardThread(self.staging)
        self.dispatcher._thread = self.thread
        self._number = 0

    def step(
        self, rows: int = 1, at_once: set[str] | None = None, true: Any = None
    ) -> None:
        segment = self.dispatcher.reserve(rows)
        blocks = (SimpleNamespace(decoding=self._decoding),)
        layout = SimpleNamespace(blocks=blocks, sent=blocks, num_held=0)
        placed: Any = SimpleNamespace(layout=layout, shift=self._number)
        step = StagedStep(self._number, placed, segment, true)
        self._number += 1
        self.dispatcher.add(step, at_once or set())


@pytest.fixture
def sending() -> Sending:
    return Sending()


def test_small_steps_leave_together(sending: Sending) -> None:
    for _ in range(STEPS_AT_ONCE):
        sending.step()
    assert sending.thread.calls == []
    sending.step()
    assert sending.thread.calls == [STEPS_AT_ONCE, "all"]


def test_copies_of_large_steps_are_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    """They begin with the next step, behind the tokens sampled from their rows."""
    rows = SEND_BYTES // 4 // 2
    sending = Sending(ring=20 * rows, requests=32)
    copied: list[int] = []
    monkeypatch.setattr(sending.staging, "to_host", lambda own: copied.append(len(own)))
    for copies in ([], [], [2], [2, 1]):
        sending.step(rows)
        assert copied == copies
    assert sending.thread.calls == [2, 1, "all"]


def test_steps_that_were_sent_for_an_end_count_as_well(sending: Sending) -> None:
    for number in range(STEPS_AT_ONCE):
        sending.step()
        if number == 9:
            sending.dispatcher.send()
    sending.step()
    assert sending.thread.calls == [10, STEPS_AT_ONCE - 10, "all"]


def test_an_eighth_of_the_memory_is_enough(sending: Sending) -> None:
    sending.step(RING // 8 - 1)
    sending.step()
    assert sending.thread.calls == []
    sending.step()
    assert sending.thread.calls == [2, "all"]


def test_a_reader_of_each_step_gets_only_its_own_rows(sending: Sending) -> None:
    sending.step()
    sending.step(at_once={"live"})
    assert sending.thread.calls == [2, ("live",)]


def test_steps_with_assumed_positions_do_not_wait(sending: Sending) -> None:
    starts: Any = TrueStarts
    sending.step(true=starts)
    sending.step()
    assert sending.thread.calls == [1, "all"]


def test_nothing_waits_while_nothing_is_captured(sending: Sending) -> None:
    sending.dispatcher.hand_on()
    assert sending.thread.calls == []
    sending.step()
    sending.dispatcher.send()
    sending.dispatcher.hand_on()
    sending.dispatcher.hand_on()
    assert sending.thread.calls == [1, "all"]


def test_where_there_is_no_room_all_that_waits_is_handed_on(sending: Sending) -> None:
    sending.step(RING // 8 - 1)
    sending.dispatcher.send()
    segment = sending.dispatcher.reserve(RING)
    assert segment == Segment(0, RING)
    assert sending.thread.calls == [1, "all"]


def test_a_page_goes_by_itself_behind_what_came_before(
    sending: Sending, monkeypatch: pytest.MonkeyPatch
) -> None:
    sending.step()
    monkeypatch.setattr(sending.staging, "to_pages", lambda *step: ({}, None))
    sending.step(4)
    assert sending.thread.calls == [1, 1, "all"]

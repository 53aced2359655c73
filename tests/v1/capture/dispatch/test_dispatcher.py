# SPDX-License-Identifier: Apache-2.0
"""When staged steps leave and are handed on, and what requests that end share."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.capture.dispatch import dispatcher as dispatching
from vllm.v1.capture.dispatch.dispatcher import SEND_BYTES, STEPS_AT_ONCE, Dispatcher
from vllm.v1.capture.dispatch.step_buffer import StagedStep
from vllm.v1.capture.staging.ring import Segment, Staging
from vllm.v1.residual.step_view import TrueStarts


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
    staging = Staging(1, 4, torch.float32, torch.device("cpu"))
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
        self,
        rows: int = 1,
        at_once: set[str] | None = None,
        true: Any = None,
        batch: int = 0,
        requests: int | None = None,
    ) -> None:
        segment = self.dispatcher.reserve(rows)
        own = self._decoding if requests is None else dict.fromkeys(range(requests))
        blocks = (SimpleNamespace(decoding=own),)
        layout = SimpleNamespace(blocks=blocks, sent=blocks, num_held=0, batch=batch)
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


def test_a_small_batch_of_those_that_alternate_hurries_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatching, "BYTES_AT_ONCE", 10 * 4)
    sending = Sending()
    for _ in range(10):
        assert sending.thread.calls == []
        sending.step(8, batch=0, requests=8)
        sending.step(1, batch=1, requests=1)
    assert sending.thread.calls == [19, "all"]


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

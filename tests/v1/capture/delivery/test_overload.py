# SPDX-License-Identifier: Apache-2.0
"""The guarantees of each policy, for any order of rows, ends and pauses."""

import errno
import io
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.v1.capture._sinks import WAIT, Answers, RecordingSink, key
from vllm.v1.capture.delivery import consumer_thread as lane_module
from vllm.v1.capture.delivery import row_bytes
from vllm.v1.capture.delivery import spill as spill_module
from vllm.v1.capture.delivery.consumer_thread import Ending, SinkLane
from vllm.v1.capture.delivery.spill import RowFiles, SpilledRows, SpillStore
from vllm.v1.capture.groups import GroupChunk, GroupEnd
from vllm.v1.capture.types import (
    CaptureChunk,
    CaptureFinalize,
    CaptureKey,
    CaptureResult,
    VllmInternalRequestId,
)
from vllm.v1.residual.tap import Tap

WIDTH = 4
ROW_BYTES = WIDTH * 4
MAX_BYTES = 8 * ROW_BYTES


class Gate(RecordingSink):
    """Passes chunks only while it is open; keeps the rows of each key."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()
        self.entered = threading.Event()
        self.rows: dict[CaptureKey, list[float]] = {}
        self.finalized: dict[CaptureKey, dict[str, Any]] = {}

    def submit_chunk(self, chunk: CaptureChunk) -> None:
        self.entered.set()
        assert self.open.wait(WAIT)
        seen = self.rows.setdefault(chunk.key, [])
        assert chunk.row_offset == len(seen), "a gap, or rows twice"
        assert chunk.tensor.shape[0] == len(chunk.metadata["positions"])
        assert torch.equal(chunk.tensor, chunk.tensor[:, :1].expand(-1, WIDTH))
        seen += chunk.tensor[:, 0].tolist()

    def submit_finalize(self, finalize: CaptureFinalize) -> None:
        assert finalize.key not in self.finalized, "a key was finalized twice"
        self.finalized[finalize.key] = finalize.sidecar


class Traffic:
    """A lane with requests whose rows arrive in turns, like those of a batch.

    Those whose name begins with "a" have their keys in groups.
    """

    def __init__(
        self,
        overload: Literal["block", "drop"] = "block",
        spill: SpillStore | None = None,
        taps: int = 2,
        max_items: int = 3,
    ) -> None:
        self.sink = Gate()
        self.lane = SinkLane("test", self.sink, MAX_BYTES, max_items, overload, spill)
        self._taps = taps
        self.sent: dict[str, int] = {}
        self.answers: dict[str, Answers] = {}

    def step(self, parts: dict[str, int]) -> None:
        """Run one step that computes this many rows of each of these requests."""
        items: list[GroupChunk] = []
        for request, count in parts.items():
            start = self.sent.get(request, 0)
            self.sent[request] = start + count
            positions = list(range(start, start + count))
            rows = torch.tensor(positions, dtype=torch.float32)[None, :, None]
            rows = rows.repeat(self._taps, 1, WIDTH)
            group = GroupChunk(*self._group(request), rows, start, 0, positions)
            items += [group] if request.startswith("a") else group.apart()
        self.lane.submit(items)

    def _group(self, request: str) -> tuple[VllmInternalRequestId, tuple[Tap, ...]]:
        keys = [key(request, layer) for layer in range(self._taps)]
        return keys[0][0], tuple(one[1:] for one in keys)

    def end(self, request: str, counted: int | None = None) -> None:
        """End a request whose first `counted` rows are valid."""
        count = self.sent.get(request, 0) if counted is None else counted
        positions = list(range(count))
        facts = {"positions": positions, "token_ids": positions, "num_rows": count}
        own, taps = self._group(request)
        ends = [GroupEnd(own, (tap,), facts) for tap in taps]
        if request.startswith("a"):
            ends = [GroupEnd(own, taps, facts)]
        self.answers[request] = Answers()
        self.lane.finish(Ending(request, ends, self.answers[request]))

    def answer(self, request: str) -> CaptureResult:
        """The answer to a request that has ended; the consumer takes all until then."""
        self.sink.open.set()
        return self.answers[request].next()


names = st.sampled_from("abc")
steps = st.dictionaries(names, st.integers(1, 4), min_size=1)
# A step; the consumer stops; it continues; a request ends.
events = st.one_of(
    steps.map(lambda parts: ("step", parts)),
    st.just(("stop", None)),
    st.just(("go", None)),
    names.map(lambda name: ("end", name)),
)


def play(traffic: Traffic, story: Sequence[Any], may_stop: bool) -> None:
    """Run a sequence of events; every request ends once, at the latest at its end."""
    life: dict[str, int] = {}
    sink = traffic.sink
    sink.open.set()
    for what, argument in story:
        if what == "step":
            parts = {f"{n}{life.get(n, 0)}": count for n, count in argument.items()}
            traffic.step(parts)
        elif what == "end":
            current = f"{argument}{life.get(argument, 0)}"
            if current in traffic.sent:
                traffic.end(current)
                life[argument] = life.get(argument, 0) + 1
        elif what == "stop" and may_stop:
            sink.open.clear()
        else:
            sink.open.set()
    sink.open.set()
    for request in traffic.sent.keys() - traffic.answers.keys():
        traffic.end(request)


@given(story=st.lists(events, max_size=25), on_disk=st.integers(0, 4096))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_spilling_loses_nothing_and_keeps_the_order(
    tmp_path: Path, story: Sequence[Any], on_disk: int
) -> None:
    # With little disk space spilling blocks; the consumer must not be stopped then.
    may_stop = on_disk == 0
    store = SpillStore(tmp_path, on_disk or 1 << 20)
    play_without_loss(Traffic(spill=store), story, may_stop)
    assert store._files.used_bytes == 0
    assert list(tmp_path.iterdir()) == []


@given(story=st.lists(events, max_size=25))
def test_blocking_loses_nothing_and_keeps_the_order(story: Sequence[Any]) -> None:
    play_without_loss(Traffic(), story, may_stop=False)


def play_without_loss(traffic: Traffic, story: Sequence[Any], may_stop: bool) -> None:
    play(traffic, story, may_stop)
    for request, answers in traffic.answers.items():
        assert answers.next().status == "ok"
        expected = [float(p) for p in range(traffic.sent[request])]
        for layer in range(2):
            assert traffic.sink.rows[key(request, layer)] == expected
    traffic.lane.close(WAIT)


@given(story=st.lists(events, max_size=25))
def test_every_dropped_row_is_counted_once_and_noted(story: Sequence[Any]) -> None:
    traffic, dropped = Traffic("drop"), 0
    sink = traffic.sink
    play(traffic, story, may_stop=True)
    for request, answers in traffic.answers.items():
        result, missing = answers.next(), 0
        for layer in range(2):
            found = sink.rows.get(key(request, layer), [])
            sidecar = sink.finalized[key(request, layer)]
            assert found == [float(position) for position in sidecar["positions"]]
            assert sidecar["token_ids"] == sidecar["positions"]
            assert sidecar["num_rows"] == len(found)
            missing += traffic.sent[request] - len(found)
        total = 2 * traffic.sent[request]
        if missing:
            assert result.status == "partial_error"
            assert f"{missing} of {total} rows were dropped" in str(result.error)
        else:
            assert (result.status, result.error) == ("ok", None)
        dropped += missing
    assert traffic.lane.counters().dropped_rows == dropped
    traffic.lane.close(WAIT)


def test_dropped_rows_past_the_end_did_not_count() -> None:
    traffic = Traffic("drop", taps=1, max_items=1)
    traffic.step({"a": 2})
    traffic.step({"a": 3})  # Dropped; a stop string invalidates it.
    traffic.end("a", counted=2)
    assert traffic.answer("a").status == "ok"
    traffic.lane.close(WAIT)


def test_memory_is_bounded_while_rows_spill(tmp_path: Path) -> None:
    store = SpillStore(tmp_path, 1 << 20)
    traffic = Traffic(spill=store, taps=1, max_items=100)
    for _ in range(50):
        traffic.step({"a": 4})
        assert traffic.lane.counters().queue_bytes <= MAX_BYTES
    counters = traffic.lane.counters()
    assert counters.spilled_rows == 50 * 4 - 8
    assert counters.spill_bytes == counters.spilled_bytes == 192 * ROW_BYTES
    assert store._files.used_bytes == counters.spill_bytes
    assert list(tmp_path.iterdir()) == []  # files without a name
    traffic.end("a")
    assert traffic.answer("a").status == "ok"
    traffic.lane.close(WAIT)


def test_the_place_of_released_rows_is_used_again(tmp_path: Path) -> None:
    files, rows = RowFiles(tmp_path), torch.zeros(2, 4)
    (kept,) = files.write([rows + 100])
    for number in range(50):
        (last,) = files.write([rows + number])
        assert torch.equal(*last.blocks(1000), rows + number)
    assert files.used_bytes <= 3 * rows.nbytes
    assert torch.equal(*kept.blocks(1000), rows + 100)


def test_no_row_goes_to_a_file_that_is_being_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, files = torch.arange(8.0).view(2, 4), RowFiles(tmp_path)
    written: list[SpilledRows] = []

    class Closing(io.FileIO):
        def close(self) -> None:
            if not written:  # As another thread does meanwhile.
                written.extend(files.write([rows]))
            super().close()

    def opened(folder: Path) -> Closing:
        return Closing(os.open(folder, os.O_RDWR | os.O_TMPFILE), "r+")

    monkeypatch.setattr(spill_module, "_unnamed_file", opened)
    files.write([rows])  # Nobody keeps them.
    (kept,) = written
    assert torch.equal(*kept.blocks(1000), rows)


class FullDisk:
    """Writes fail like those to a full disk, while it is full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = True
        self.tried = threading.Semaphore(0)
        self._write = row_bytes.os.pwritev
        monkeypatch.setattr(row_bytes.os, "pwritev", self._pwritev)

    def _pwritev(self, descriptor: int, data: Any, offset: int) -> int:
        if not self.full:
            return self._write(descriptor, data, offset)
        self.tried.release()
        self._write(descriptor, [data[0][:1]], offset)  # torn, as on a real one
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_makes_spilling_wait_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk(monkeypatch)
    monkeypatch.setattr(spill_module, "RETRY_SECONDS", 0.0)
    store = SpillStore(tmp_path, 1 << 20)
    traffic = Traffic(spill=store, taps=1, max_items=1)
    traffic.step({"a": 1})
    sender = threading.Thread(target=traffic.step, args=({"a": 2},))
    sender.start()
    assert disk.tried.acquire(timeout=WAIT)
    sender.join(0.1)
    assert sender.is_alive(), "nothing waits although the disk is full"
    assert store._files.used_bytes == 0
    disk.full = False  # Space was freed; the row can be spilled.
    sender.join(WAIT)
    assert not sender.is_alive()
    assert traffic.lane.counters().spilled_rows == 2
    traffic.end("a")
    assert traffic.answer("a").status == "ok"
    assert traffic.sink.rows[key("a", 0)] == [0.0, 1.0, 2.0]
    traffic.lane.close(WAIT)


def test_a_disk_that_does_not_give_back_spoils_what_lay_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traffic = Traffic(spill=SpillStore(tmp_path, 1 << 20), taps=1, max_items=1)
    traffic.step({"a": 1})
    traffic.step({"b": 1})  # on disk

    def unreadable(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(row_bytes.os, "preadv", unreadable)
    traffic.end("a")
    traffic.end("b")
    assert traffic.answer("a").status == "ok"
    result = traffic.answer("b")
    assert result.status == "error"
    assert "Input/output error" in str(result.error)
    assert traffic.lane.counters().failed_rows == 1
    traffic.lane.close(WAIT)


class TestAConsumerThatDoesNotComeBack:
    @pytest.fixture(autouse=True)
    def impatient(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(lane_module, "STALL_SECONDS", 0.3)

    def test_loses_what_waits_and_hangs_nothing(self) -> None:
        traffic = Traffic(taps=1, max_items=2)
        for _ in range(5):  # would wait forever
            traffic.step({"a": 1})
        traffic.end("a")
        result = traffic.answers["a"].next()
        assert result.status == "error"
        assert "has not returned from a call" in str(result.error)
        assert traffic.lane.counters().failed_rows == 5
        traffic.sink.open.set()
        traffic.lane.close(WAIT)

    def test_waiting_requests_are_answered_when_its_owner_looks(self) -> None:
        traffic = Traffic(taps=1)
        traffic.step({"a": 1})
        traffic.end("a")
        traffic.end("b")
        assert traffic.sink.entered.wait(WAIT)
        while not traffic.lane.check():
            threading.Event().wait(0.02)
        assert traffic.answers["a"].next().status == "error"
        assert traffic.answers["b"].next().status == "error"
        traffic.sink.open.set()
        traffic.lane.close(WAIT)
        assert len(traffic.answers["a"].results) == 1, "answered twice"

    def test_serves_later_requests_once_it_has(self) -> None:
        traffic = Traffic(taps=1, max_items=1)
        traffic.step({"a": 1})
        traffic.step({"a": 1})
        traffic.end("a")
        assert traffic.answers["a"].next().status == "error"
        traffic.sink.open.set()
        while traffic.lane.check():
            threading.Event().wait(0.02)
        traffic.step({"b": 2})
        traffic.end("b")
        assert traffic.answer("b").status == "ok"
        assert traffic.sink.finalized[key("a", 0)]["capture_error"]
        assert traffic.sink.rows[key("b", 0)] == [0.0, 1.0]
        traffic.lane.close(WAIT)


def test_closing_answers_for_what_is_not_worked_off() -> None:
    traffic = Traffic(taps=1)
    traffic.step({"a": 3})
    traffic.end("a")
    assert traffic.sink.entered.wait(WAIT)
    traffic.lane.close(0.1)
    result = traffic.answers["a"].next()
    assert isinstance(result, CaptureResult)
    assert (result.status, result.error) == (
        "error",
        "the engine stopped before it was delivered",
    )
    traffic.sink.open.set()

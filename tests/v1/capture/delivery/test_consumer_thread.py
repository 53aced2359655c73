# SPDX-License-Identifier: Apache-2.0
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from tests.v1.capture._sinks import (
    WAIT,
    Answers,
    KeepingConsumer,
    RecordingSink,
    SlowSink,
    chunk,
    end,
    key,
)
from vllm.v1.capture.consumer import BatchingSink
from vllm.v1.capture.delivery import consumer_thread
from vllm.v1.capture.delivery.consumer_thread import Ending, SinkLane
from vllm.v1.capture.groups import GroupChunk, GroupEnd
from vllm.v1.capture.registry import as_sink
from vllm.v1.capture.results import GroupedRows
from vllm.v1.capture.types import CaptureKey, CaptureResult
from vllm.v1.residual.tap import Tap


class Lanes:
    """Opens lanes and closes them after the test."""

    def __init__(self) -> None:
        self._open: list[SinkLane] = []

    def __call__(
        self, sink: Any, max_bytes: int = 1 << 20, max_items: int = 100
    ) -> SinkLane:
        self._open.append(SinkLane("test", sink, max_bytes, max_items))
        return self._open[-1]

    def close(self) -> None:
        for lane in self._open:
            lane.close(WAIT)


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    opened = Lanes()
    yield opened
    opened.close()


def test_a_request_gets_the_joined_result_of_its_keys(lanes: Lanes) -> None:
    sink = RecordingSink()
    lane, answers = lanes(sink), Answers()
    lane.submit([chunk(key(layer=0)), chunk(key(layer=2))])
    result = end(lane, answers, key(layer=0), key(layer=2))
    assert (result.status, result.payload) == ("ok", [0, 2])
    assert sink.threads == {"capture-test"}


@pytest.mark.parametrize("wrong", ["submit_chunk", "submit_finalize", "get_result"])
@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_a_sink_that_raises_spoils_the_key_it_raised_for(
    lanes: Lanes, wrong: str, error: type[BaseException]
) -> None:
    lane, answers = lanes(RecordingSink(wrong, error)), Answers()
    lane.submit([chunk(key(layer=1)), chunk(key(layer=2))])
    result = end(lane, answers, key(layer=1), key(layer=2))
    assert result.status == "partial_error"
    assert result.error == f"{error.__name__}: {wrong} went wrong"
    assert result.payload == [2]
    assert end(lane, answers, key("second", 2)).status == "ok"


def test_a_key_that_was_not_finalized_is_not_waited_for(lanes: Lanes) -> None:
    class Silent(RecordingSink):
        def get_result(self, key: CaptureKey) -> CaptureResult | None:
            return None

    lane, answers = lanes(Silent("submit_finalize")), Answers()
    result = end(lane, answers, key(layer=1))  # Abandoned after WAIT, far below 60 s.
    assert result.error == "ValueError: submit_finalize went wrong"


def test_a_key_that_failed_gets_no_more_chunks(lanes: Lanes) -> None:
    sink = RecordingSink("submit_chunk")
    lane, answers = lanes(sink), Answers()
    lane.submit([chunk(key(layer=1))])
    lane.submit([chunk(key(layer=1), offset=1)])
    assert end(lane, answers, key(layer=1)).status == "error"
    assert [name for name, _ in sink.calls].count("submit_chunk") == 1


def test_a_batch_that_raises_spoils_all_its_keys(lanes: Lanes) -> None:
    class Batches(RecordingSink):
        def submit_chunk_batch(self, chunks: Any) -> None:
            raise ValueError("no batch")

    lane, answers = lanes(Batches()), Answers()
    lane.submit([chunk(key(layer=0)), chunk(key(layer=2))])
    result = end(lane, answers, key(layer=0), key(layer=2))
    assert (result.status, result.error) == ("error", "ValueError: no batch")


def test_an_answer_that_raises_does_not_stop_the_lane(lanes: Lanes) -> None:
    lane, answers = lanes(RecordingSink()), Answers()

    def lost(result: CaptureResult) -> None:
        raise OSError("nobody listens")

    lane.finish(Ending("first", (), lost))
    assert end(lane, answers, key("second")).status == "ok"


def test_a_sink_that_never_has_a_result_costs_a_request_one_timeout(
    lanes: Lanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Silent(RecordingSink):
        def get_result(self, key: CaptureKey) -> CaptureResult | None:
            return CaptureResult(key, "pending") if key[1] else None

    monkeypatch.setattr(consumer_thread, "RESULT_TIMEOUT", 0.2)
    lane, answers = lanes(Silent()), Answers()
    many = [key(layer=layer) for layer in range(200)]
    result = end(lane, answers, *many)  # One timeout each would take 40 s.
    assert result.status == "error"
    assert "no result within" in (result.error or "")


def test_a_result_may_come_later(lanes: Lanes) -> None:
    class Late(RecordingSink):
        def get_result(self, key: CaptureKey) -> CaptureResult | None:
            super().get_result(key)
            return CaptureResult(key, "ok") if len(self.calls) > 4 else None

    lane, answers = lanes(Late()), Answers()
    assert end(lane, answers, key()).status == "ok"


@pytest.mark.parametrize("limit", [{"max_items": 2}, {"max_bytes": 8}])
def test_a_full_queue_makes_the_sender_wait(lanes: Lanes, limit: dict) -> None:
    sink = SlowSink()
    lane = lanes(sink, **limit)  # Either way two chunks of four bytes fit.
    lane.submit([chunk(key())])
    assert sink.entered.acquire(timeout=WAIT)
    lane.submit([chunk(key(), offset=1)])
    third = threading.Thread(target=lane.submit, args=([chunk(key(), offset=2)],))
    third.start()
    third.join(0.1)
    assert third.is_alive(), "the queue took more than it may hold"
    sink.let_go.release()
    third.join(WAIT)
    assert not third.is_alive()
    sink.let_go.release(2)


def test_a_packet_larger_than_the_queue_is_taken_alone(lanes: Lanes) -> None:
    sink = RecordingSink()
    lane, answers = lanes(sink, max_bytes=4), Answers()
    lane.submit([chunk(key(), rows=100)])
    assert end(lane, answers, key()).status == "ok"


def test_closing_works_off_the_queue_first(lanes: Lanes) -> None:
    sink = SlowSink()
    lane = SinkLane("test", sink, 1 << 20, 100)
    for offset in range(5):
        lane.submit([chunk(key(), offset=offset)])
    sink.let_go.release(5)
    lane.close(WAIT)
    assert [name for name, _ in sink.calls] == ["submit_chunk"] * 5 + ["shutdown"]


def test_closing_gives_up_on_a_sink_that_hangs() -> None:
    sink = SlowSink()
    lane = SinkLane("test", sink, 1 << 20, 100)
    lane.submit([chunk(key())])
    lane.close(0.1)
    assert ("shutdown", (None, 1)) in sink.calls
    sink.let_go.release()


def test_a_shutdown_that_raises_is_contained(monkeypatch: pytest.MonkeyPatch) -> None:
    escaped: list[object] = []
    monkeypatch.setattr(threading, "excepthook", escaped.append)
    SinkLane("test", RecordingSink("shutdown"), 1 << 20, 100).close(WAIT)
    assert not escaped


def test_a_consumer_gets_all_rows_of_a_key_at_once(lanes: Lanes) -> None:
    consumer = KeepingConsumer()
    lane, answers = lanes(BatchingSink(consumer)), Answers()
    lane.submit([chunk(key(), rows=2)])
    lane.submit([chunk(key(), rows=1, offset=2)])
    result = end(lane, answers, key())
    assert result.payload == "kept 3"
    assert consumer.rows[key()].flatten().tolist() == [0.0, 1.0, 2.0]


def test_a_key_without_rows_is_an_empty_tensor(lanes: Lanes) -> None:
    consumer = KeepingConsumer()
    lane, answers = lanes(BatchingSink(consumer)), Answers()
    end(lane, answers, key(), hidden_size=8)
    assert consumer.rows[key()].shape == (0, 8)


class GroupConsumer(KeepingConsumer):
    """Notes the groups that it gets, and raises for one that has a refused layer."""

    def __init__(self, refuses: frozenset[int] = frozenset()) -> None:
        super().__init__(refuses)
        self.groups: list[tuple[Any, list[Any], list[int]]] = []

    def on_group(
        self, taps: Sequence[Tap], rows: torch.Tensor, sidecar: dict[str, Any]
    ) -> GroupedRows:
        if self.refuses.intersection(layer for layer, _ in taps):
            raise RuntimeError("not this layer")
        self.groups.append((taps, rows.flatten().tolist(), sidecar["positions"]))
        return GroupedRows([(tuple(taps), rows, {**sidecar})])


TAPS = (1, "post_block"), (2, "post_block")
POSITIONS = {"positions": [0, 1, 2], "token_ids": [5, 6, 7], "num_rows": 3}


def submit_group(lane: SinkLane, first: int, stop: int) -> None:
    positions = list(range(first, stop))
    rows = torch.tensor([[[float(p)] for p in positions], [[-p] for p in positions]])
    lane.submit([GroupChunk(key()[0], TAPS, rows, first, 0, positions)])


def end_group(lane: SinkLane, **sidecar: Any) -> CaptureResult:
    answers = Answers()
    ends = [GroupEnd(key()[0], TAPS, {**POSITIONS, **sidecar})]
    lane.finish(Ending("r", ends, answers))
    return answers.next()


def test_the_keys_of_a_group_are_handled_together(lanes: Lanes) -> None:
    consumer = GroupConsumer()
    lane = lanes(as_sink(consumer))
    submit_group(lane, 0, 1)
    submit_group(lane, 1, 3)
    result = end_group(lane, capture_note="it ended early")
    assert (result.status, result.error) == ("partial_error", "it ended early")
    rows = [0.0, 1.0, 2.0, 0.0, -1.0, -2.0]
    assert consumer.groups == [(TAPS, rows, [0, 1, 2])]
    assert result.payload.by_tap()[2, "post_block"].tolist() == [[0.0], [-1.0], [-2.0]]
    assert consumer.rows == {}


def test_a_group_with_a_key_that_came_alone_is_handled_by_key(lanes: Lanes) -> None:
    consumer = GroupConsumer()
    lane = lanes(as_sink(consumer))
    lane.submit([chunk(key(layer=1)), chunk(key(layer=2))])
    submit_group(lane, 1, 3)
    result = end_group(lane)
    assert (result.status, result.payload) == ("ok", ["kept 3", "kept 3"])
    assert consumer.rows[key(layer=1)].flatten().tolist() == [0.0, 1.0, 2.0]
    assert consumer.sidecars[key(layer=2)]["layer"] == 2
    assert consumer.groups == []


def test_a_group_that_fails_reports_each_of_its_keys(lanes: Lanes) -> None:
    consumer = GroupConsumer(refuses=frozenset({2}))
    lane = lanes(as_sink(consumer))
    submit_group(lane, 0, 3)
    result = end_group(lane)
    said = "RuntimeError: not this layer"
    assert (result.status, result.error, result.payload) == ("error", said, None)
    assert consumer.errors == {key(layer=1): said, key(layer=2): said}
    assert lane.counters().failed_rows == 6
    result = end_group(lane, capture_error="rows are missing")
    assert (result.status, result.error) == ("error", "rows are missing")


def test_a_class_with_an_on_capture_of_its_own_gets_keys(lanes: Lanes) -> None:
    class Own(GroupConsumer):
        def on_capture(self, key: Any, tensor: Any, sidecar: Any) -> str:
            return f"own {tensor.sum()}"

    lane = lanes(as_sink(Own()))
    submit_group(lane, 0, 3)
    assert end_group(lane).payload == ["own 3.0", "own -3.0"]

# SPDX-License-Identifier: Apache-2.0
import queue
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.v1.capture._sinks import WAIT, chunk, key
from vllm.v1.capture.groups import GroupChunk, GroupEnd, chunks_in
from vllm.v1.capture.transport.zmq_channel import (
    ChunksMessage,
    EndMessage,
    Inbox,
    Message,
    Outbox,
    ResultMessage,
)
from vllm.v1.capture.types import CaptureResult


class Wire:
    """An outbox with the inbox that it sends to."""

    def __init__(self) -> None:
        self.came: queue.Queue[Message] = queue.Queue()
        self.inbox = Inbox(self._take)
        self.outbox = Outbox()

    def _take(self, message: Message) -> None:
        if isinstance(message, EndMessage) and message.request_id == "bad":
            raise RuntimeError("the handler fails")
        self.came.put(message)

    def carry(self, message: Message) -> Any:
        self.outbox.send(self.inbox.address, message)
        return self.came.get(timeout=WAIT)

    def carry_payload(
        self, payload: Any, status: Any = "ok", error: str | None = None
    ) -> CaptureResult:
        result = CaptureResult(key(), status, error, payload)
        return self.carry(ResultMessage.of("r", "files", 0, result)).result()


@pytest.fixture(scope="module")
def wire() -> Iterator[Wire]:
    opened = Wire()
    yield opened
    opened.outbox.close()
    opened.inbox.close()


DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def same(got: Any, sent: Any) -> bool:
    """Whether two payloads are equal, tensors in each bit."""
    if isinstance(sent, torch.Tensor):
        return got.dtype == sent.dtype and torch.equal(got, sent)
    if isinstance(sent, dict):
        return list(got) == list(sent) and all(same(got[k], sent[k]) for k in sent)
    if isinstance(sent, list):
        return len(got) == len(sent) and all(map(same, got, sent))
    return type(got) is type(sent) and got == sent


@pytest.mark.parametrize(
    "payload",
    [
        *(None, "a line", 3, 1.5, True, ["a", "b"], {"a": [1, {"b": None}]}, {}, []),
        *(torch.randn(rows, 5).to(t) for t in DTYPES for rows in (0, 1, 300)),
        *(
            {(n, "post_block"): torch.randn(m, 7).to(t) for n, m in enumerate((0, 9))}
            for t in DTYPES
        ),
        {(3, "pre_attn"): "path", (4, "pre_attn"): ["x"]},
        [torch.ones(2), {"x": torch.zeros(3, 4), "y": "text"}],
        {(3, "pre_attn"): {"mean": torch.ones(2), "rows": 4}},
    ],
)
def test_payloads_arrive_as_they_were(wire: Wire, payload: Any) -> None:
    result = wire.carry_payload(payload)
    assert result.key == ("r", -1, "*")
    assert (result.status, result.error) == ("ok", None)
    assert same(result.payload, payload)


def test_numpy_numbers_arrive_as_numbers(wire: Wire) -> None:
    sent = {"mean": np.float32(0.5), "more": [np.int64(3), np.bool_(True)]}
    assert wire.carry_payload(sent).payload == {"mean": 0.5, "more": [3, True]}


@pytest.mark.parametrize(
    "payload",
    [
        object(),
        "a\ud800",
        1 << 70,
        {("one",): 1},
        {(1, 2, 3): 1},
        {(1 << 70, "pre_attn"): 1},
        {(1, "pre_attn"): object()},
    ],
)
def test_a_payload_that_cannot_be_sent_is_an_error(wire: Wire, payload: Any) -> None:
    result = wire.carry_payload(payload)
    assert result.status == "partial_error"
    assert "cannot be sent" in (result.error or "")
    assert result.payload is None


def test_a_payload_that_cannot_travel_does_not_improve_a_status(wire: Wire) -> None:
    assert wire.carry_payload(object(), status="error").status == "error"


def test_an_error_with_what_no_encoding_has_arrives(wire: Wire) -> None:
    result = wire.carry_payload(None, "error", "no file a\udcff")
    assert (result.status, result.error) == ("error", "no file a\\udcff")


def test_chunks_arrive_as_they_were(wire: Wire) -> None:
    sent = [chunk(key(layer=layer), rows=3, offset=layer) for layer in range(3)]
    taps = ((5, "pre_attn"), (6, "pre_attn"))
    rows = torch.arange(24.0).view(2, 4, 3)[:, 1:3]  # not contiguous
    group = GroupChunk(key()[0], taps, rows, 7, 2, [7, 8])
    message = ChunksMessage("files", 1, [*sent, group])
    got = wire.carry(message)
    assert (got.instance, got.stage) == ("files", 1)
    arrived = chunks_in(got.chunks)
    for one, other in zip(chunks_in([*sent, group]), arrived, strict=True):
        assert one.key == other.key
        assert torch.equal(one.tensor, other.tensor)
        assert (one.row_offset, one.step_index) == (other.row_offset, other.step_index)
        assert one.metadata == other.metadata


def test_a_bad_message_does_not_stop_the_next(wire: Wire) -> None:
    wire.outbox.send(wire.inbox.address, EndMessage("bad", "files", 0, []))
    ends = [GroupEnd(key()[0], ((1, "pre_attn"),), {"positions": [1, 2]})]
    got = wire.carry(EndMessage("good", "files", 0, ends))
    assert got.request_id == "good"
    assert got.ends == ends


def test_what_was_queued_is_sent_before_closing() -> None:
    wire = Wire()
    for number in range(50):
        result = CaptureResult(key(), "ok", payload=number)
        wire.outbox.send(wire.inbox.address, ResultMessage.of("r", "x", 0, result))
    wire.outbox.close()
    got = [wire.came.get(timeout=WAIT).result().payload for _ in range(50)]  # type: ignore[union-attr]
    assert got == list(range(50))
    wire.inbox.close()

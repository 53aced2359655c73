# SPDX-License-Identifier: Apache-2.0
"""Rows count towards the limit until their response was sent or has failed."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import BaseModel

from vllm.entrypoints.serve.capture import answers, sending
from vllm.entrypoints.serve.capture.answers import Document
from vllm.entrypoints.serve.capture.sending import (
    LEAST_PIECE,
    MOST_PIECE,
    Sender,
    counting_unsent,
)
from vllm.v1.capture.frontend.http import deferred
from vllm.v1.capture.frontend.path_locks import PathLocks
from vllm.v1.capture.frontend.request_tracker import HeldBytes, RequestTracker
from vllm.v1.capture.frontend.unsent import (
    ResponseScope,
    when_response_ends,
)
from vllm.v1.capture.results import RowsByTap
from vllm.v1.capture.transport import handouts as handouts_module
from vllm.v1.capture.transport.handouts import Handouts
from vllm.v1.capture.types import CaptureResult

SIZES = {"inline": 1000}
BODY = bytes(range(256)) * (LEAST_PIECE // 100)


def start(length: int | None) -> dict[str, Any]:
    head = [] if length is None else [(b"Content-Length", str(length).encode())]
    return {"type": "http.response.start", "status": 200, "headers": head}


def body(data: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


class Response:
    """An application that responds with rows, and records what is held per message."""

    def __init__(self, *messages: dict[str, Any]) -> None:
        self.unsent, self.messages = HeldBytes(), messages
        self.sent: list[dict[str, Any]] = []
        self.held: list[int] = []

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        # Results are fetched in tasks that the handler starts.
        await asyncio.create_task(self.fetch())
        for message in self.messages:
            await send(message)
        self.held.append(self.unsent.of("inline", "unsent"))

    async def fetch(self) -> None:
        self.unsent.put_until_sent(SIZES)

    async def send(self, message: Any) -> None:
        self.held.append(self.unsent.of("inline", "unsent"))
        self.sent.append(message)

    def run(self, send: Callable[[Any], Any] | None = None) -> None:
        asyncio.run(counting_unsent(self.app)({}, None, send or self.send))  # type: ignore[arg-type]
        assert self.unsent.of("inline", "unsent") == 0


def test_a_body_is_sent_in_pieces_and_counts_until_its_last_byte() -> None:
    response = Response(start(len(BODY)), body(BODY, more=True), body(b""))
    response.run()
    pieces = [message["body"] for message in response.sent[1:]]
    assert b"".join(pieces) == BODY
    assert len(pieces[0]) == LEAST_PIECE
    # After the last byte the client may send the next request; only an end follows.
    assert response.held == [1000] * len(response.sent[:-1]) + [0, 0]
    more = [message["more_body"] for message in response.sent[1:]]
    assert more == [True] * (len(pieces) - 1) + [False]


def test_pieces_grow_while_a_client_reads_quickly_and_shrink_when_it_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = 0.0
    monkeypatch.setattr(sending, "monotonic", lambda: clock)
    sizes: list[int] = []
    seconds_per_piece = 0.001

    async def send(message: Any) -> None:
        nonlocal clock
        clock += seconds_per_piece
        sizes.append(len(message["body"]))

    async def run() -> None:
        nonlocal seconds_per_piece
        scope = ResponseScope()
        scope.until_the_end(lambda: None)
        sender = Sender(scope, send)
        await sender(body(bytes(5 * MOST_PIECE), more=True))
        assert sizes[:3] == [LEAST_PIECE, 2 * LEAST_PIECE, 4 * LEAST_PIECE]
        assert max(sizes) == MOST_PIECE
        sizes.clear()
        seconds_per_piece = 2.0
        await sender(body(bytes(5 * MOST_PIECE)))
        assert sizes[:2] == [MOST_PIECE, MOST_PIECE // 2]
        assert min(sizes[:-1]) == LEAST_PIECE

    asyncio.run(run())


def test_a_client_that_reads_at_once_does_not_keep_others_waiting() -> None:
    sent: list[int] = []

    async def send(message: Any) -> None:  # Never waits.
        sent.append(len(message["body"]))

    async def run() -> None:
        scope = ResponseScope()
        scope.until_the_end(lambda: None)
        sending_rows = asyncio.ensure_future(
            Sender(scope, send)(body(bytes(4 * MOST_PIECE)))
        )
        while not sending_rows.done():
            before = len(sent)
            await asyncio.sleep(0)  # The turn of another request.
            assert len(sent) <= before + 1
        assert sum(sent) == 4 * MOST_PIECE

    asyncio.run(run())


def test_a_body_of_unknown_length_counts_until_its_end() -> None:
    response = Response(start(None), body(b"data: 1", more=True), body(b""))
    response.run()
    assert response.held == [1000, 1000, 1000, 0]
    assert response.sent == list(response.messages)


def test_a_large_answer_without_rows_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sending, "STALL_SECONDS", 0.01)
    given: list[int] = []

    async def stuck(message: Any) -> None:
        given.append(len(message["body"]))
        await asyncio.Event().wait()

    with pytest.raises(OSError, match="does not read"):
        asyncio.run(Sender(ResponseScope(), stuck)(body(bytes(8 * MOST_PIECE))))
    assert given == [LEAST_PIECE]


def test_shared_memory_expires_without_another_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handouts = Handouts(1 << 20)
    monkeypatch.setattr(answers, "HANDOUTS", handouts)
    for module in (answers, handouts_module):
        monkeypatch.setattr(module, "KEPT_SECONDS", -1.0)
    payload = RowsByTap()
    about = {"positions": [0], "token_ids": [1], "transport": "shm"}
    payload.put((0, "post_block"), torch.ones(1, 4), about)
    result = CaptureResult(("r", -1, "*"), "ok", payload=payload)  # type: ignore[arg-type]

    class Reply(BaseModel):
        capture_results: Any

    async def respond() -> None:
        document = Document(Reply(capture_results=deferred({"inline": result})))
        await document.hand_out()
        assert not document.parts and handouts.held_bytes
        while handouts.held_bytes:
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(respond(), 30))


def test_a_small_response_without_rows_is_sent_as_it_is() -> None:
    sent: list[Any] = []
    small = BODY[:LEAST_PIECE]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(start(None))
        await send(body(small))

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(counting_unsent(app)({}, None, send))  # type: ignore[arg-type]
    assert sent == [start(None), body(small)]


def test_without_a_response_the_caller_has_the_rows() -> None:
    unsent = HeldBytes()
    unsent.put_until_sent(SIZES)
    assert unsent.of("inline", "unsent") == 0
    assert not when_response_ends(lambda: None)


@pytest.fixture
def tracker() -> RequestTracker:
    tracker = RequestTracker(PathLocks({}), 1, answered=lambda *_: None)
    with tracker.lock:
        tracker.begin("r", 0, "r-0", ("inline",))
        tracker.hold("r", SIZES)
    return tracker


def held(tracker: RequestTracker, aborted: bool = False) -> int:
    states = ("aborted",) if aborted else ("running", "unsent")
    return tracker.held.of("inline", *states)


def test_fetched_rows_count_until_their_response_is_sent(
    tracker: RequestTracker,
) -> None:
    counts = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        result = CaptureResult(("r-0", -1, "*"), "ok")  # type: ignore[arg-type]
        tracker.note("r-0", "inline", 0, result)
        assert tracker.results("r", "r") is not None
        counts.append(held(tracker))

    asyncio.run(counting_unsent(app)({}, None, None))  # type: ignore[arg-type]
    assert counts == [1000]
    assert held(tracker) == 0


def test_rows_of_a_client_that_has_left_are_freed_once_they_are_complete(
    tracker: RequestTracker,
) -> None:
    tracker.discard("r")
    tracker.discard("unknown")
    assert held(tracker) == 0
    assert held(tracker, aborted=True) == 1000
    result = CaptureResult(("r-0", -1, "*"), "ok")  # type: ignore[arg-type]
    tracker.note("r-0", "inline", 0, result)
    assert held(tracker, aborted=True) == 0
    assert tracker.results("r", "r") is None

# SPDX-License-Identifier: Apache-2.0
"""Responses that carry rows are sent as fast as their clients read, and no faster.

A server buffers what its client has not read. Here large bodies are cut, so that the
next piece waits until the one before has left, and the rows count towards
`max_inflight_bytes` until the last one has.
"""

import asyncio
from collections.abc import Iterator
from time import monotonic
from typing import Any, ClassVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm.entrypoints.serve.capture.event_parts import EventParts, accepts_parts
from vllm.logger import init_logger
from vllm.v1.capture.frontend.unsent import ResponseScope, response_scope

logger = init_logger(__name__)

STALL_SECONDS = 120.0
"""A client that reads nothing for so long is given up, and its rows are freed."""

LEAST_PIECE, MOST_PIECE = 1 << 18, 1 << 23
"""The least and most bytes given to the server at once.

The server asks for more only after all of it has left, so that a fast client waits
between two pieces, and a slow one has `STALL_SECONDS` for each. The responses that are
being sent share the maximum: the event loop may write a piece of each before it comes
to another request.
"""
QUICK_SECONDS, SLOW_SECONDS = 0.02, 1.0
"""A piece that leaves in less or more time than this doubles or halves the next."""


def counting_unsent(app: ASGIApp) -> ASGIApp:
    """The same application; rows count until their response has left the server."""

    async def counted(scope: Scope, receive: Receive, send: Send) -> None:
        with response_scope() as response:
            sender: Send = Sender(response, send)
            if accepts_parts(scope.get("headers", [])):
                sender = EventParts(response, sender)
            await app(scope, receive, sender)

    return counted


class Sender:
    """Sends the messages of one response."""

    _active: ClassVar[int] = 0
    """Number of messages with rows that are being sent."""

    def __init__(self, response: ResponseScope, send: Send) -> None:
        """Send with `send`; a response without rows is sent as it is."""
        self._response = response
        self._send = send
        self._left: int | None = None
        """Bytes of the body that are to come, where its head says how many."""
        self._piece_bytes = LEAST_PIECE

    async def __call__(self, message: Message) -> None:
        """Send a message.

        Raises:
            OSError: the client has read nothing for `STALL_SECONDS`.

        """
        if message["type"] == "http.response.start":
            self._left = _content_length(message)
        if not self._response.holds:
            await self._send(message)
            return
        Sender._active += 1
        try:
            for piece in self._pieces(message):
                begin = monotonic()
                await self._send_soon(piece)
                self._adapt(len(piece.get("body", b"")), monotonic() - begin)
                self._end_with(piece)
                # Sending does not wait while the client reads as fast as the server
                # sends, and no other request would have a turn.
                await asyncio.sleep(0)
        finally:
            Sender._active -= 1

    def _pieces(self, message: Message) -> Iterator[dict[str, Any]]:
        """A message with a large body as several; the last is small."""
        body = message.get("body", b"")
        if len(body) <= self._piece():
            yield dict(message)
            return
        # A slice of a view is not a copy.
        body = memoryview(body)
        while body:
            size = self._piece()
            piece, body = body[:size], body[size:]
            more = message.get("more_body", False) or bool(body)
            yield {**message, "body": piece, "more_body": more}

    def _piece(self) -> int:
        share = max(MOST_PIECE // Sender._active, LEAST_PIECE)
        return min(self._piece_bytes, share)

    def _adapt(self, sent: int, seconds: float) -> None:
        if seconds > SLOW_SECONDS:
            self._piece_bytes = max(self._piece_bytes // 2, LEAST_PIECE)
        elif seconds < QUICK_SECONDS and sent == self._piece_bytes:
            self._piece_bytes = min(self._piece_bytes * 2, MOST_PIECE)

    async def _send_soon(self, message: Message) -> None:
        try:
            async with asyncio.timeout(STALL_SECONDS):
                await self._send(message)
        except TimeoutError:
            logger.warning(
                "A client has not read its captured rows for %.0f s; they are freed "
                "and its connection is closed",
                STALL_SECONDS,
            )
            raise OSError("the client does not read") from None

    def _end_with(self, message: Message) -> None:
        """Free the rows with the last byte: the client may ask for more at once."""
        if message["type"] != "http.response.body":
            return
        if self._left is not None:
            self._left -= len(message.get("body", b""))
        if self._left == 0 or not message.get("more_body", False):
            self._response.end()


def _content_length(start: Message) -> int | None:
    for name, value in start.get("headers", ()):
        if name.lower() == b"content-length":
            return int(value)
    return None

# SPDX-License-Identifier: Apache-2.0
"""Large responses are sent as fast as their clients read, and no faster.

A server buffers what its client has not read. Here large bodies are cut, so that the
next piece waits until the one before has left, and the rows count towards
`max_inflight_bytes` until the last one, which is small, is next.
"""

import asyncio
from collections.abc import Iterator
from time import monotonic
from typing import Any, ClassVar

from starlette.responses import StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm.entrypoints.serve.capture.connections import Connection, connection_of
from vllm.logger import init_logger
from vllm.v1.capture.frontend.unsent import (
    ResponseScope,
    current_response,
    response_scope,
    when_response_ends,
)

logger = init_logger(__name__)

STALL_SECONDS = 120.0
"""A client that reads nothing for so long is given up, and its rows are freed."""

LEAST_PIECE, MOST_PIECE = 1 << 18, 1 << 23
"""The least and most bytes given to the server at once.

The server gets more only after all of it has left, so that a fast client waits between
two pieces, and a slow one has `STALL_SECONDS` for each. The responses that are being
sent without threads share the maximum: the event loop may write a piece of each before
it comes to another request.
"""
QUICK_SECONDS, SLOW_SECONDS = 0.02, 1.0
"""A piece that leaves in less or more time than this doubles or halves the next."""


def counting_unsent(app: ASGIApp) -> ASGIApp:
    """The same application; rows count until their response has left the server."""

    async def counted(scope: Scope, receive: Receive, send: Send) -> None:
        with response_scope() as response:
            await app(scope, receive, Sender(response, send, connection_of(scope)))

    return counted


class RowsResponse(StreamingResponse):
    """A response with rows, also on routes whose responses do not count."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        send_all = super().__call__

        async def respond(scope: Scope, receive: Receive, send: Send) -> None:
            when_response_ends(lambda: None)  # Something to hold, or it is not cut.
            await send_all(scope, receive, send)

        counts = current_response() is not None
        await (respond if counts else counting_unsent(respond))(scope, receive, send)


class Sender:
    """Sends the messages of one response."""

    _active: ClassVar[int] = 0
    """Number of messages with rows that are being sent."""

    def __init__(
        self,
        response: ResponseScope,
        send: Send,
        connection: Connection | None = None,
    ) -> None:
        """Send with `send`; a small message of a response without rows as it is.

        Args:
            response: the response.
            send: what the server passes to applications.
            connection: what `send` sends over, if the server has such connections.

        """
        self._response = response
        self._send = send
        self._connection = connection
        self._left: int | None = None
        """Bytes of the body that are to come, where its head says how many."""
        self._piece_bytes = LEAST_PIECE
        self._given, self._began = 0, 0.0
        """Bytes given to the server since it had sent all, and when the first were."""
        self._has_threads = connection is not None and connection.uses_threads

    async def __call__(self, message: Message) -> None:
        """Send a message.

        Raises:
            OSError: the client has read nothing for `STALL_SECONDS`.

        """
        if message["type"] == "http.response.start":
            self._left = _content_length(message)
        size = len(message.get("body", b""))
        if not self._response.holds and size <= LEAST_PIECE:
            await self._send(message)
            return
        Sender._active += 1
        try:
            for piece in self._pieces(message):
                await self._send_soon(piece)
                # Sending does not wait while the client reads as fast as the server
                # sends, and no other request would have a turn.
                await asyncio.sleep(0)
        finally:
            Sender._active -= 1

    def _pieces(self, message: Message) -> Iterator[dict[str, Any]]:
        """A message with a large body as several; the last of all is small."""
        body = memoryview(message.get("body", b""))
        if not body:
            yield dict(message)
            return
        more = message.get("more_body", False)
        ends = self._left == len(body) or (self._left is None and not more)
        while len(body) > LEAST_PIECE:
            size = self._piece()
            if ends:
                size = min(size, max(len(body) - LEAST_PIECE, LEAST_PIECE))
            piece, body = body[:size], body[size:]  # Not copied.
            yield {**message, "body": piece, "more_body": more or bool(body)}
        if body:
            # The end is copied: it may wait for the client, and the rows need not.
            yield {**message, "body": bytes(body) if ends else body}

    def _piece(self) -> int:
        if self._has_threads:
            return self._piece_bytes
        share = max(MOST_PIECE // Sender._active, LEAST_PIECE)
        return min(self._piece_bytes, share)

    async def _send_soon(self, message: Message) -> None:
        is_last = self._is_last(message)
        try:
            async with asyncio.timeout(STALL_SECONDS):
                if is_last:
                    await self._drain()
                    await self._send(message)
                    # With the last bytes the client may ask for more.
                    self._response.end()
                else:
                    await self._give(message)
        except TimeoutError:
            logger.warning(
                "A client has not read its response for %.0f s; it is freed "
                "and its connection is closed",
                STALL_SECONDS,
            )
            if self._connection is not None:
                self._connection.abort()
            raise OSError("the client does not read") from None

    async def _give(self, message: Message) -> None:
        """Send a message, and wait if the server has enough of them."""
        if not self._given:
            self._began = monotonic()
        await self._send(message)
        self._given += len(message.get("body", b""))
        if self._has_threads and self._given < self._piece_bytes:
            return
        await self._drain()
        sent, seconds = self._given, monotonic() - self._began
        self._given = 0
        if seconds > SLOW_SECONDS:
            self._piece_bytes = max(self._piece_bytes // 2, LEAST_PIECE)
        elif seconds < QUICK_SECONDS and sent >= self._piece_bytes:
            self._piece_bytes = min(self._piece_bytes * 2, MOST_PIECE)

    async def _drain(self) -> None:
        if self._connection is not None:
            await self._connection.drain()

    def _is_last(self, message: Message) -> bool:
        """Whether no bytes follow; called once for each message."""
        if message["type"] != "http.response.body":
            return False
        if self._left is not None:
            self._left -= len(message.get("body", b""))
        return self._left == 0 or not message.get("more_body", False)


def _content_length(start: Message) -> int | None:
    for name, value in start.get("headers", ()):
        if name.lower() == b"content-length":
            return int(value)
    return None

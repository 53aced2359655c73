# SPDX-License-Identifier: Apache-2.0
"""Responses that carry rows are sent as fast as their clients read, and no faster.

A server buffers what its client has not read. Here large bodies are cut, so that the
next piece waits until the one before has left, and the rows count towards
`max_inflight_bytes` until the last one has.
"""

import asyncio
from collections.abc import Iterator
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm.logger import init_logger
from vllm.v1.capture.frontend.unsent import ResponseScope, response_scope
from vllm.v1.capture.transport.bodies import PIECE_BYTES

logger = init_logger(__name__)

STALL_SECONDS = 120.0
"""A client that reads nothing for so long is given up, and its rows are freed."""


def counting_unsent(app: ASGIApp) -> ASGIApp:
    """The same application; rows count until their response has left the server."""

    async def counted(scope: Scope, receive: Receive, send: Send) -> None:
        with response_scope() as response:
            await app(scope, receive, Sender(response, send))

    return counted


class Sender:
    """Sends the messages of one response."""

    def __init__(self, response: ResponseScope, send: Send) -> None:
        """Send with `send`; a response without rows is sent as it is."""
        self._response = response
        self._send = send
        self._left: int | None = None
        """Bytes of the body that are to come, where its head says how many."""

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
        for piece in _pieces(message):
            await self._send_soon(piece)
            self._end_with(piece)

    async def _send_soon(self, message: Message) -> None:
        try:
            await asyncio.wait_for(self._send(message), STALL_SECONDS)
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


def _pieces(message: Message) -> Iterator[dict[str, Any]]:
    """A message with a large body as several; the last is small.

    Between two of them the server waits until what it has buffered is sent.
    """
    body = message.get("body", b"")
    if len(body) <= PIECE_BYTES:
        yield dict(message)
        return
    for start in range(0, len(body), PIECE_BYTES):
        last = start + PIECE_BYTES >= len(body)
        more = message.get("more_body", False) or not last
        piece = body[start : start + PIECE_BYTES]
        yield {**message, "body": piece, "more_body": more}

# SPDX-License-Identifier: Apache-2.0
"""The response to one HTTP/1.1 request, parsed as its bytes arrive."""

import asyncio
from collections.abc import AsyncIterator, Callable

import httptools
import httpx2

INTERIM = 200
"""Responses with a lower status precede the response."""


class Exchange:
    """The response to one request, filled by the parser's callbacks."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wait for a response."""
        self.response: asyncio.Future[httpx2.Response] = loop.create_future()
        self.is_complete = False
        self.keeps_connection = False
        """Whether the connection may be used for another request."""
        self.error: httpx2.TransportError | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._reason = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._pieces: list[bytes] = []
        self._arrived = asyncio.Event()

    def feed(self, data: bytes) -> None:
        """Parse what the server sent; what is not HTTP becomes the exchange's error."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.fail(httpx2.RemoteProtocolError(f"not an HTTP response: {error}"))

    def end(self, error: Exception | None) -> None:
        """The connection was lost."""
        headers = {name.lower() for name, _ in self._headers}
        framed = headers & {b"content-length", b"transfer-encoding"}
        if error is None and self.response.done() and not framed:
            self.on_message_complete()  # the end of the connection is that of the body
        elif isinstance(error, OSError):
            self.fail(httpx2.ReadError(str(error)))
        else:
            self.fail(httpx2.RemoteProtocolError("the server closed the connection"))

    def fail(self, error: httpx2.TransportError) -> None:
        """Raise an error where the response or its next piece is awaited."""
        if self.is_complete or self.error is not None:
            return
        self.error = error
        self._arrived.set()
        if not self.response.done():
            self.response.set_exception(error)

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it arrives; there is no limit on what waits here.

        Raises:
            httpx2.TransportError: the connection failed.

        """
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            found, self._pieces = self._pieces, []
            for piece in found:
                yield piece
            if self.error is not None:
                raise self.error
            if self.is_complete:
                return

    def on_status(self, reason: bytes) -> None:
        """Called by the parser, perhaps with a part."""
        self._reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser."""
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Called by the parser: a body of unknown length is a stream."""
        if self._parser.get_status_code() < INTERIM:
            return
        if all(name.lower() != b"content-length" for name, _ in self._headers):
            self._answer(stream=BodyStream(self))

    def on_body(self, piece: bytes) -> None:
        """Called by the parser."""
        self._pieces.append(piece)
        self._arrived.set()

    def on_message_complete(self) -> None:
        """Called by the parser."""
        if self._parser.get_status_code() < INTERIM:
            self._headers, self._reason = [], b""
            return
        self.is_complete = True
        self.keeps_connection = self._parser.should_keep_alive()
        self._arrived.set()
        self._answer(content=b"".join(self._pieces))

    def _answer(
        self, content: bytes | None = None, stream: "BodyStream | None" = None
    ) -> None:
        if self.response.done():  # a stream, or nobody waits any more
            return
        status = self._parser.get_status_code()
        extensions = {"http_version": b"HTTP/1.1", "reason_phrase": self._reason}
        self.response.set_result(
            httpx2.Response(
                status,
                headers=self._headers,
                content=content,
                stream=stream,
                extensions=extensions,
            )
        )


class BodyStream(httpx2.AsyncByteStream):
    """The body of a response of unknown length."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self.release: Callable[[], None] = lambda: None

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._exchange.pieces():
            yield piece

    async def aclose(self) -> None:
        """Give the connection back; it is closed if the body was not read."""
        self.release()

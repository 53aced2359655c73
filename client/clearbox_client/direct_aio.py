# SPDX-License-Identifier: Apache-2.0
"""The counterpart of `direct` for an event loop."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import h11
import httpx
from clearbox_client.direct import PIECE, WHOLE, is_open, translated

T = TypeVar("T")


class AsyncDirectTransport(httpx.AsyncBaseTransport):
    """Sends requests over kept connections, for tasks of one event loop."""

    def __init__(self) -> None:
        """Start without connections."""
        self._idle: list[_Connection] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request and read the head of its response.

        Raises:
            httpx.TransportError: the connection failed.

        """
        timeouts = request.extensions.get("timeout", {})
        connection = await self._connection(request.url, timeouts.get("connect"))
        try:
            with converted(request):
                head = await connection.ask(request, timeouts.get("read"))
        except BaseException:
            connection.close()
            raise
        body = _Body(self, connection, request)
        return httpx.Response(
            head.status_code,
            headers=head.headers.raw_items(),
            stream=body,
            extensions={"http_version": b"HTTP/1.1", WHOLE: body.whole},
        )

    async def _connection(self, url: httpx.URL, timeout: float | None) -> "_Connection":
        place = url.host, url.port or 80
        kept = [one for one in self._idle if one.place == place]
        for connection in reversed(kept):  # The last used is the likeliest open.
            self._idle.remove(connection)
            if is_open(connection.socket):
                return connection
            connection.close()
        loop = asyncio.get_running_loop()
        try:
            # On a thread: it finds the address and tries all that the name has.
            connected = await loop.run_in_executor(
                None, socket.create_connection, place, timeout
            )
        except TimeoutError as error:
            raise httpx.ConnectTimeout(str(error)) from error
        except OSError as error:
            raise httpx.ConnectError(str(error)) from error
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return _Connection(place, connected)

    def keep(self, connection: "_Connection") -> None:
        """Keep a connection whose response was read, for the next request."""
        self._idle.append(connection)

    async def aclose(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().close()


class _Connection:
    """A connection on which one request at a time is answered."""

    def __init__(self, place: tuple[str, int], connected: socket.socket) -> None:
        self.place = place
        self.socket = connected
        self.is_done = False
        """Whether the response was read to its end."""
        self._http = h11.Connection(h11.CLIENT)
        self._timeout: float | None = None
        self._keeps = False

    @property
    def is_reusable(self) -> bool:
        """Whether the next request may use it."""
        return self.is_done and self._keeps

    async def ask(self, request: httpx.Request, timeout: float | None) -> h11.Response:
        """Send a request; returns the head of the response."""
        self._http = h11.Connection(h11.CLIENT)
        self.is_done, self._timeout = False, timeout
        begin = h11.Request(
            method=request.method,
            target=request.url.raw_path,
            headers=request.headers.raw,
        )
        data = await request.aread()
        parts = (begin, h11.Data(data=data), h11.EndOfMessage())
        sent = b"".join([self._http.send(part) or b"" for part in parts])
        loop = asyncio.get_running_loop()
        await self._in_time(loop.sock_sendall(self.socket, sent))
        while not isinstance(head := await self.event(), h11.Response):
            pass  # An informational response.
        said = [value for name, value in head.headers if name == b"connection"]
        self._keeps = head.http_version == b"1.1" and b"close" not in said
        return head

    async def event(self) -> Any:
        """The next part of the response."""
        while (event := self._http.next_event()) is h11.NEED_DATA:
            loop = asyncio.get_running_loop()
            received = loop.sock_recv(self.socket, PIECE)
            self._http.receive_data(await self._in_time(received))
        return event

    async def fill(self, content: memoryview) -> None:
        """Read the whole body into memory of its size."""
        early, _ = self._http.trailing_data
        content[: len(early)] = early
        done = len(early)
        while done < len(content):
            count = await self._receive(content[done:])
            if not count:
                left = len(content) - done
                raise h11.RemoteProtocolError(
                    f"IncompleteRead({done} bytes read, {left} more expected)"
                )
            done += count
        self.is_done = True

    async def _receive(self, content: memoryview) -> int:
        try:
            count = self.socket.recv_into(content)
        except BlockingIOError:
            loop = asyncio.get_running_loop()
            return await self._in_time(loop.sock_recv_into(self.socket, content))
        await asyncio.sleep(0)  # Other tasks have a turn.
        return count

    async def _in_time(self, received: Awaitable[T]) -> T:
        try:
            return await asyncio.wait_for(received, self._timeout)
        except asyncio.TimeoutError as error:  # noqa: UP041
            # Not the same class before Python 3.11.
            raise TimeoutError("the server sends nothing") from error

    def close(self) -> None:
        self.socket.close()


class _Body(httpx.AsyncByteStream):
    """The body of a response."""

    def __init__(
        self,
        owner: AsyncDirectTransport,
        connection: _Connection,
        request: httpx.Request,
    ) -> None:
        self._owner = owner
        self._connection = connection
        self._request = request

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with converted(self._request):
            while isinstance(event := await self._connection.event(), h11.Data):
                yield bytes(event.data)
        self._connection.is_done = True

    async def whole(self, content: memoryview) -> memoryview:
        """Read the body into memory of its size, which is returned."""
        with converted(self._request):
            await self._connection.fill(content)
        return content

    async def aclose(self) -> None:
        """Keep the connection if the body was read to its end, otherwise close it."""
        if self._connection.is_reusable:
            self._owner.keep(self._connection)
        else:
            self._connection.close()


@contextmanager
def converted(request: httpx.Request) -> Iterator[None]:
    """Convert errors of `h11` and of sockets to those of `httpx`."""
    try:
        with translated(request):
            yield
    except h11.RemoteProtocolError as error:
        raise httpx.RemoteProtocolError(str(error), request=request) from error

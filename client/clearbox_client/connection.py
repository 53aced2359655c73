# SPDX-License-Identifier: Apache-2.0
"""Requests over kept connections of the standard library's `http.client`.

A body with rows is read into memory of its size: the kernel copies what it has received
to where it stays. The time and the bytes that a server may take are bounded, whatever
it sends.
"""

import http.client
import io
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from time import monotonic
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from clearbox_client.bulk import SAFETENSORS, Content
from clearbox_client.errors import ClearboxError
from clearbox_client.memory import MEMORY
from clearbox_client.requests import document_of, is_last

PIECE = 64 << 10
"""Bytes that are received at once where the length of a body is not known."""
DOCUMENT_SHARE = 8
"""JSON may have as many bytes as rows divided by this: it takes more memory parsed."""


class Deadline:
    """When an answer, or the next event of a stream, must have arrived."""

    def __init__(self, seconds: float) -> None:
        """Begin now."""
        self._seconds = seconds
        self.renew()

    def renew(self) -> None:
        """Begin again."""
        self._end = monotonic() + self._seconds

    def left(self) -> float:
        """Seconds until then.

        Raises:
            TimeoutError: it has passed.

        """
        left = self._end - monotonic()
        if left <= 0:
            raise TimeoutError(f"the answer takes longer than {self._seconds:g} s")
        return left


class _Arriving(io.RawIOBase):
    """What a socket receives before a deadline."""

    def __init__(
        self, connected: socket.socket, raw: io.RawIOBase, deadline: Deadline
    ) -> None:
        self._socket = connected
        self._raw = raw
        self._deadline = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._socket.settimeout(self._deadline.left())
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Response(http.client.HTTPResponse):
    def __init__(
        self, deadline: Deadline, sock: socket.socket, *args: Any, **more: Any
    ) -> None:
        super().__init__(sock, *args, **more)
        raw: Any = self.fp.detach()
        self.fp = io.BufferedReader(_Arriving(sock, raw, deadline), PIECE)


class Answer:
    """A response whose head has arrived."""

    def __init__(
        self, response: http.client.HTTPResponse, deadline: Deadline, max_bytes: int
    ) -> None:
        """Hold the response; its body may have `max_bytes`, a document fewer."""
        self.status = response.status
        self.kind = (response.getheader("content-type") or "").partition(";")[0]
        """The media type."""
        self._response = response
        self._deadline = deadline
        self._has_rows = self.kind == SAFETENSORS
        self._most = max_bytes if self._has_rows else max_bytes // DOCUMENT_SHARE

    def read(self) -> Content:
        """The body; writable if it has rows.

        Raises:
            ClearboxError: it is too large, or compressed.

        """
        encoding = self._response.getheader("content-encoding") or "identity"
        if encoding != "identity":
            raise self._refused(
                f"it is compressed ({encoding}), which nobody asked for"
            )
        size = self._response.length
        if size is not None and size > self._most:
            raise self._too_large()
        if self._has_rows and size is not None:
            content = MEMORY.take(size)
            if (count := self._response.readinto(content)) < size:
                raise http.client.IncompleteRead(b"", size - count)
            return content
        data = self._response.read(self._most + 1)
        if len(data) > self._most:
            raise self._too_large()
        if self._response.length:
            raise http.client.IncompleteRead(b"", self._response.length)
        return data

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the documents of a stream, each of which has the whole time.

        Raises:
            ClearboxError: one is too large.
            IncompleteRead: the stream was cut, which only its last line shows:
                `http.client` takes a lost connection for the end of chunks.

        """
        is_whole = False
        while line := self._response.readline(self._most + 1):
            if len(line) > self._most:
                raise self._too_large()
            text = line.decode()
            is_whole |= is_last(text)
            if (document := document_of(text)) is not None:
                yield document
                self._deadline.renew()
        if not is_whole:
            raise http.client.IncompleteRead(b"")

    def _too_large(self) -> ClearboxError:
        return self._refused(
            f"it is larger than {self._most} bytes; capture less at once, or pass "
            "max_bytes to the client"
        )

    def _refused(self, why: str) -> ClearboxError:
        return ClearboxError(f"the server's answer: {why}", self.status, None, None)


class Exchange:
    """Requests that another thread may abort."""

    def __init__(self) -> None:
        """Start without requests."""
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._is_aborted = False

    def begin(self, connected: socket.socket) -> None:
        """A request uses this socket from now on.

        Raises:
            ConnectionAbortedError: the requests were aborted before.

        """
        with self._lock:
            if self._is_aborted:
                raise ConnectionAbortedError("the request was cancelled")
            self._sockets.append(connected)

    def end(self, connected: socket.socket) -> None:
        """The socket is free for others."""
        with self._lock:
            if connected in self._sockets:
                self._sockets.remove(connected)

    def abort(self) -> None:
        """Let threads that wait for the server fail."""
        with self._lock:
            self._is_aborted = True
            for connected in self._sockets:
                with suppress(OSError):  # The server has closed it.
                    socket.socket.shutdown(connected, socket.SHUT_RDWR)


CURRENT: ContextVar[Exchange | None] = ContextVar("exchange", default=None)
"""The exchange of the requests that this context sends."""


class Connections:
    """Sends requests to one server; safe to use from several threads."""

    def __init__(
        self, url: str, headers: Mapping[str, str], timeout: float, max_bytes: int
    ) -> None:
        """Connect to nothing yet.

        Args:
            url: the server's address.
            headers: of every request.
            timeout: most seconds for an answer, and for each event of a stream.
            max_bytes: most bytes of an answer.

        """
        parts = urlsplit(url if "//" in url else f"http://{url}")
        self._is_encrypted = parts.scheme == "https"
        self._place = parts.hostname or "", parts.port or (80, 443)[self._is_encrypted]
        self._prefix = parts.path.rstrip("/")
        self._headers = {"Accept": "*/*", "Accept-Encoding": "identity", **headers}
        self._timeout = timeout
        self._max_bytes = max_bytes
        proxies = getproxies()
        proxy = proxies.get(parts.scheme) or proxies.get("all")
        self._proxy = None
        if proxy and not proxy_bypass(parts.netloc):
            found = urlsplit(proxy if "//" in proxy else f"http://{proxy}")
            self._proxy = found.hostname or "", found.port or 80
            if not self._is_encrypted:
                self._prefix = f"http://{parts.netloc}{self._prefix}"
        self._idle: list[http.client.HTTPConnection] = []
        self._lock = threading.Lock()

    @contextmanager
    def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Iterator[Answer]:
        """Send a request; yields its answer.

        Raises:
            ClearboxError: with status 0, if the connection fails.

        """
        deadline = Deadline(self._timeout)
        connection: http.client.HTTPConnection | None = None
        response: http.client.HTTPResponse | None = None
        connected: socket.socket | None = None
        exchange = CURRENT.get() or Exchange()
        try:
            connection = self._connection(deadline)
            connected = socket_of(connection)
            exchange.begin(connected)
            connected.settimeout(deadline.left())
            sent = {**self._headers, **(headers or {})}
            if body is not None:
                sent["Content-Type"] = "application/json"
            connection.request(method, self._prefix + path, body, sent)
            response = connection.getresponse()
            yield Answer(response, deadline, self._max_bytes)
        except (OSError, http.client.HTTPException) as error:
            raise ClearboxError(
                f"the server does not answer: {error!r}; start it, or pass its address "
                "as url",
                0,
                "url",
                None,
            ) from error
        finally:
            if connected is not None:
                exchange.end(connected)
            if connection is not None:
                self._put_back(connection, response)

    def _connection(self, deadline: Deadline) -> http.client.HTTPConnection:
        """A connection that is open."""
        while (connection := self._take()) is not None:
            connection.response_class = partial(_Response, deadline)  # type: ignore[assignment]
            if is_open(socket_of(connection)):
                return connection
            connection.close()
        where, left = self._proxy or self._place, deadline.left()
        if self._is_encrypted:
            context = ssl.create_default_context()
            connection = http.client.HTTPSConnection(
                *where, timeout=left, context=context
            )
            if self._proxy is not None:
                connection.set_tunnel(*self._place)
        else:
            connection = http.client.HTTPConnection(*where, timeout=left)
        connection.response_class = partial(_Response, deadline)  # type: ignore[assignment]
        connection.connect()
        return connection

    def _take(self) -> http.client.HTTPConnection | None:
        with self._lock:  # The last used is the likeliest open.
            return self._idle.pop() if self._idle else None

    def _put_back(
        self,
        connection: http.client.HTTPConnection,
        response: http.client.HTTPResponse | None,
    ) -> None:
        """Keep a connection whose response was read to its end."""
        if response is None or not response.isclosed() or response.will_close:
            if response is not None:
                response.close()
            connection.close()
            return
        with self._lock:
            self._idle.append(connection)

    def close(self) -> None:
        """Close the idle connections."""
        while (connection := self._take()) is not None:
            connection.close()


def socket_of(connection: http.client.HTTPConnection) -> socket.socket:
    """The socket of a connection that was made."""
    found: socket.socket | None = connection.sock
    assert found is not None, "the connection was not made"
    return found


def is_open(idle: socket.socket) -> bool:
    """Whether the server has not closed an idle connection."""
    idle.setblocking(False)
    try:
        idle.recv(1, 0 if isinstance(idle, ssl.SSLSocket) else socket.MSG_PEEK)
    except (BlockingIOError, ssl.SSLWantReadError):
        return True
    except OSError:
        return False
    return False  # Closed, or the server has sent what nobody asked for.

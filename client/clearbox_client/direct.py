# SPDX-License-Identifier: Apache-2.0
"""Connections to servers without TLS, which read a large response in one piece.

Rows make responses of hundreds of megabytes. `httpx` reads them in pieces of 64 kB and
takes 200 to 300 ms of CPU time for 134 MB; the kernel takes 60 ms to clear the pages of
as many new bytes. Here the kernel copies what it has received to where it stays.
"""

import http.client
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx

PIECE = 64 << 10
"""Most bytes of a piece of a response whose length is not known, such as a stream."""

WHOLE = "clearbox.whole"
"""Extension of a response: a function that reads its body into memory of its size."""


def is_direct(url: str) -> bool:
    """Whether a server is reached without TLS and proxies, which `httpx` handles."""
    parts = urlsplit(url)
    proxied = getproxies().keys() & {"http", "all"}
    if parts.scheme != "http" or not parts.hostname:
        return False
    return not proxied or bool(proxy_bypass(parts.netloc))


class DirectTransport(httpx.BaseTransport):
    """Sends requests over kept connections; safe to use from several threads."""

    def __init__(self) -> None:
        """Start without connections."""
        self._idle: list[http.client.HTTPConnection] = []
        self._lock = threading.Lock()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request and read the head of its response.

        Raises:
            httpx.TransportError: the connection failed.

        """
        timeouts = request.extensions.get("timeout", {})
        connection = self._connection(request.url, timeouts.get("connect"))
        try:
            with translated(request):
                assert connection.sock is not None
                connection.sock.settimeout(timeouts.get("read"))
                _send(connection, request)
                response = connection.getresponse()
        except BaseException:
            connection.close()
            raise
        body = _Body(self, connection, response, request)
        return httpx.Response(
            response.status,
            headers=response.getheaders(),
            stream=body,
            extensions={"http_version": b"HTTP/1.1", WHOLE: body.whole},
        )

    def _connection(
        self, url: httpx.URL, timeout: float | None
    ) -> http.client.HTTPConnection:
        place = url.host, url.port or 80
        with self._lock:
            kept = [one for one in self._idle if (one.host, one.port) == place]
            for connection in reversed(kept):  # The last used is the likeliest open.
                self._idle.remove(connection)
                if connection.sock is not None and is_open(connection.sock):
                    return connection
                connection.close()
        connection = http.client.HTTPConnection(*place, timeout=timeout)
        try:
            connection.connect()
        except TimeoutError as error:
            raise httpx.ConnectTimeout(str(error)) from error
        except OSError as error:
            raise httpx.ConnectError(str(error)) from error
        return connection

    def keep(self, connection: http.client.HTTPConnection) -> None:
        """Keep a connection whose response was read, for the next request."""
        with self._lock:
            self._idle.append(connection)

    def close(self) -> None:
        """Close the idle connections."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()


class _Body(httpx.SyncByteStream):
    """The body of a response: one piece if its length is known."""

    def __init__(
        self,
        owner: DirectTransport,
        connection: http.client.HTTPConnection,
        response: http.client.HTTPResponse,
        request: httpx.Request,
    ) -> None:
        self._owner = owner
        self._connection = connection
        self._response = response
        self._request = request

    def __iter__(self) -> Iterator[bytes]:
        with translated(self._request):
            if self._response.length is not None:
                if data := self._response.read():
                    yield data
                return
            while data := self._response.read1(PIECE):
                yield data

    def whole(self, content: memoryview) -> memoryview:
        """Read the body into memory of its size, which is returned."""
        with translated(self._request):
            count = self._response.readinto(content)
            if count < len(content):
                left = len(content) - count
                raise http.client.IncompleteRead(bytes(content[:count]), left)
        return content

    def close(self) -> None:
        """Keep the connection if the body was read to its end, otherwise close it."""
        reusable = self._response.isclosed() and not self._response.will_close
        self._response.close()
        if reusable:
            self._owner.keep(self._connection)
        else:
            self._connection.close()


def _send(connection: http.client.HTTPConnection, request: httpx.Request) -> None:
    target = request.url.raw_path.decode("ascii")
    connection.putrequest(
        request.method, target, skip_host=True, skip_accept_encoding=True
    )
    for name, value in request.headers.raw:
        connection.putheader(name, value)
    connection.endheaders(request.read() or None)


def is_open(idle: socket.socket) -> bool:
    """Whether the server has not closed an idle connection."""
    idle.setblocking(False)
    try:
        idle.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False  # Closed, or the server has sent what nobody asked for.


@contextmanager
def translated(request: httpx.Request) -> Iterator[None]:
    """Convert errors of `http.client` to those of `httpx`."""
    try:
        yield
    except TimeoutError as error:
        raise httpx.ReadTimeout(str(error), request=request) from error
    except http.client.HTTPException as error:
        raise httpx.RemoteProtocolError(repr(error), request=request) from error
    except OSError as error:
        raise httpx.ReadError(str(error), request=request) from error

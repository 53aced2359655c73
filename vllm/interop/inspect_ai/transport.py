# SPDX-License-Identifier: Apache-2.0
"""A transport for OpenAI's client that takes less CPU time for responses with rows."""

import asyncio
import os
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx2
import sniffio
from inspect_ai._util.http_defaults_httpx2 import (
    CONNECT_RETRIES_ENV,
    POOL_CONNECTIONS_ENV,
    POOL_KEEPALIVE_CONNECTIONS_ENV,
    LoopScopedTransport,
)

from vllm.interop.inspect_ai.connection import Connection
from vllm.interop.inspect_ai.exchange import BodyStream

TUNED = (CONNECT_RETRIES_ENV, POOL_CONNECTIONS_ENV, POOL_KEEPALIVE_CONNECTIONS_ENV)
"""Variables that only Inspect's own transport follows."""


def origin_of(url: str) -> str | None:
    """The origin of a server that `DirectTransport` may ask, as in httpx's mounts.

    None for TLS, for a server behind a proxy, and if one of `TUNED` is set.
    """
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        return None
    proxied = getproxies().keys() & {"http", "all"}
    if proxied and not proxy_bypass(parts.netloc):
        return None
    if any(os.environ.get(name) for name in TUNED):
        return None
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"http://{host}:{parts.port or 80}"


class DirectTransport(httpx2.AsyncBaseTransport):
    """Connections to one server, kept per event loop as Inspect does.

    How many there are is the number of simultaneous calls, Inspect's `max_connections`.
    """

    def __init__(self, limits: httpx2.Limits) -> None:
        """Start without connections.

        Args:
            limits: `keepalive_expiry` is followed; the rest is that of the transport
                for requests that are not sent directly.

        """
        self._expiry = limits.keepalive_expiry
        self._idle: dict[asyncio.AbstractEventLoop, list[Connection]] = {}
        self._other = LoopScopedTransport(limits=limits, retries=1)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request; a response of known length is read to its end.

        Raises:
            httpx2.TransportError: the connection failed.

        """
        if not _is_plain(request):
            return await self._other.handle_async_request(request)
        timeouts = request.extensions.get("timeout") or {}
        message = _head_of(request) + await request.aread()
        connection = self._kept() or await _opened(request.url, timeouts.get("connect"))
        try:
            response = await connection.ask(message, timeouts.get("read"))
        except BaseException:
            connection.close()
            raise
        return self._released(connection, response)

    async def aclose(self) -> None:
        """Close the running loop's idle connections; forget those of other loops."""
        if sniffio.current_async_library() == "asyncio":
            for connection in self._idle.pop(asyncio.get_running_loop(), ()):
                connection.close()
        self._idle.clear()
        await self._other.aclose()

    def _kept(self) -> Connection | None:
        idle = self._of_this_loop()
        while idle:
            connection = idle.pop()
            if connection.is_usable(self._expiry):
                return connection
            connection.close()
        return None

    def _of_this_loop(self) -> list[Connection]:
        loop = asyncio.get_running_loop()
        if loop not in self._idle:
            # Closing connections of a closed loop would fail; they are collected.
            for other in [one for one in self._idle if one.is_closed()]:
                self._idle.pop(other, None)
            self._idle[loop] = []
        return self._idle[loop]

    def _released(
        self, connection: Connection, response: httpx2.Response
    ) -> httpx2.Response:
        """Keep the connection for the next request, at the end of the body."""

        def release() -> None:
            if connection.finish():
                idle = self._of_this_loop()
                idle[:] = [*(one for one in idle if one.is_open), connection]

        if isinstance(response.stream, BodyStream):
            response.stream.release = release
        else:
            release()
        return response


def _is_plain(request: httpx2.Request) -> bool:
    """Whether a request is of the kind that OpenAI's client sends."""
    return (
        request.method in ("GET", "POST", "DELETE")
        and "transfer-encoding" not in request.headers
        and sniffio.current_async_library() == "asyncio"
    )


def _head_of(request: httpx2.Request) -> bytes:
    lines = [name + b": " + value for name, value in request.headers.raw]
    target = request.url.raw_path
    first = request.method.encode("ascii") + b" " + target + b" HTTP/1.1"
    return b"\r\n".join([first, *lines, b"", b""])


async def _opened(url: httpx2.URL, seconds: float | None) -> Connection:
    """A new connection; a second attempt is made, as by Inspect's transport."""
    try:
        return await _connected(url, seconds)
    except httpx2.TransportError:
        return await _connected(url, seconds)


async def _connected(url: httpx2.URL, seconds: float | None) -> Connection:
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(seconds):
            _, connection = await loop.create_connection(
                Connection, url.host, url.port or 80
            )
    except TimeoutError as error:
        raise httpx2.ConnectTimeout(f"no connection in {seconds} s") from error
    except OSError as error:
        raise httpx2.ConnectError(str(error)) from error
    return connection

# SPDX-License-Identifier: Apache-2.0
"""Connections that send large messages on threads.

The kernel copies what is sent, a second for a few GB. An event loop that does this
serves nobody meanwhile, and uvloop holds the interpreter for as much as fits the
socket's buffer. Threads send at the same time, each for many connections.
"""

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

from fastapi import FastAPI
from uvicorn import Config
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from vllm.entrypoints.serve.steering.authority import captures_or_steers
from vllm.v1.residual.machine import copy_threads

SMALL, MANY = 1 << 18, 1 << 23
"""Bytes of a message that is sent at once, because the change of threads takes 0.1 ms;
and how many may wait for a thread before the protocol is paused."""

STATE = "capture_connection"
"""Where requests have their connection, in the state of their ASGI scope."""


def send_on_threads(config: Config, app: FastAPI) -> None:
    """Let a server that captures use these connections."""
    args = getattr(app.state, "args", None)
    if config.http == "auto" and args is not None and captures_or_steers(args):
        config.http = Protocol


def connection_of(scope: Mapping[str, Any]) -> "Connection | None":
    """The connection of a request; None on a server without them."""
    found: Connection | None = scope.get("state", {}).get(STATE)
    return found


class Protocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """HTTP as uvicorn speaks it, over a `Connection`."""

    app_state: dict[str, Any]
    """Copied into the scope of each request."""

    def connection_made(self, transport: Any) -> None:
        """Called by the event loop."""
        self._connection = Connection(transport, self)
        self.app_state = {**self.app_state, STATE: self._connection}
        super().connection_made(self._connection)

    def connection_lost(self, error: Exception | None) -> None:
        """Called by the event loop."""
        self._connection.lose()
        super().connection_lost(error)


class Lane:
    """A thread that sends for several connections."""

    def __init__(self) -> None:
        self.sending = 0
        """Number of connections; only the server's event loop changes it."""
        self._loop = asyncio.SelectorEventLoop()
        threading.Thread(
            target=self._loop.run_forever, name="capture-send", daemon=True
        ).start()

    def send(
        self,
        to: socket.socket,
        messages: Sequence[bytes | memoryview],
        done: Callable[[BaseException | None], object],
    ) -> None:
        """Send all messages, then call `done` on this event loop with the error."""
        here = asyncio.get_running_loop()

        def tell(sent: Any) -> None:
            with suppress(RuntimeError):  # The server's event loop has ended.
                here.call_soon_threadsafe(done, sent.exception())

        sending = asyncio.run_coroutine_threadsafe(
            self._send_all(to, messages), self._loop
        )
        sending.add_done_callback(tell)

    async def _send_all(
        self, to: socket.socket, messages: Sequence[bytes | memoryview]
    ) -> None:
        for message in messages:
            await self._loop.sock_sendall(to, message)
            await asyncio.sleep(0)  # Other connections have a turn.


@cache
def _lanes() -> tuple[Lane, ...]:
    return tuple(Lane() for _ in range(copy_threads()))


class Connection:
    """A transport that wraps another one; for the event loop's thread only.

    What it does not define is the other one's.
    """

    def __init__(self, transport: Any, protocol: Any) -> None:
        """Wrap the transport that an event loop has made for `protocol`."""
        self._transport = transport
        self._protocol = protocol
        plain = transport.get_extra_info("socket") is not None
        encrypted = transport.get_extra_info("sslcontext") is not None
        self.uses_threads = plain and not encrypted
        """Whether large messages are sent on threads."""
        self._socket: socket.socket | None = None
        """The same socket with a descriptor of its own, which the event loop does not
        close while a thread uses it."""
        self._waiting: list[bytes | memoryview] = []
        self._waiting_bytes = 0
        self._lane: Lane | None = None
        """The thread that sends now."""
        self._sent = asyncio.Event()
        self._sent.set()
        self._closes = False
        self._is_lost = False

    async def drain(self) -> None:
        """Wait until threads have sent what was written, or the connection is lost."""
        await self._sent.wait()

    def write(self, data: bytes | memoryview) -> None:
        """Send `data`, which must not change until then."""
        if self._lane is None and not self._may_leave_on_a_thread(data):
            self._transport.write(data)
        elif not self.is_closing():
            self._waiting.append(data)
            self._waiting_bytes += len(data)
            if self._lane is None:
                self._send_next()
            elif self._waiting_bytes > MANY:
                self._protocol.pause_writing()

    def _may_leave_on_a_thread(self, data: bytes | memoryview) -> bool:
        if not self.uses_threads or len(data) <= SMALL:
            return False
        if self._transport.get_write_buffer_size() or self.is_closing():
            return False
        if self._socket is None:
            try:
                number = os.dup(self._transport.get_extra_info("socket").fileno())
            except OSError:  # The process has no descriptor left.
                return False
            self._socket = socket.socket(fileno=number)
            self._socket.setblocking(False)
        return True

    def writelines(self, parts: list[bytes]) -> None:
        """Send parts as one."""
        self.write(b"".join(parts))

    def _send_next(self) -> None:
        assert self._socket is not None, "nothing may leave on a thread"
        messages, self._waiting, self._waiting_bytes = self._waiting, [], 0
        self._sent.clear()
        self._lane = min(_lanes(), key=lambda lane: lane.sending)
        self._lane.sending += 1
        self._lane.send(self._socket, messages, self._next)

    def _next(self, error: BaseException | None) -> None:
        assert self._lane is not None, "nothing was being sent"
        self._lane.sending -= 1
        self._lane = None
        if error is not None or self._is_lost:
            self._waiting.clear()
        if self._waiting:
            self._send_next()
        else:
            self._sent.set()
            if self._is_lost:
                self._close_socket()
            elif error is not None:
                self._transport.abort()
            elif self._closes:
                self._transport.close()
        self._protocol.resume_writing()

    def is_closing(self) -> bool:
        """Whether nothing more is sent."""
        return self._closes or self._transport.is_closing()

    def close(self) -> None:
        """Close the connection after what was written."""
        self._closes = True
        if self._lane is None:
            self._transport.close()

    def abort(self) -> None:
        """Close the connection now."""
        self._closes = True
        self._wake()
        self._transport.abort()

    def set_protocol(self, protocol: Any) -> None:
        """Change the protocol, for a request that leaves HTTP."""
        self._protocol = protocol
        self._transport.set_protocol(protocol)

    def lose(self) -> None:
        """Let go of the socket, which the event loop has closed."""
        self._is_lost = True
        if self._lane is None:
            self._close_socket()
        else:
            self._wake()

    def _wake(self) -> None:
        """Let a thread that waits for the client fail."""
        if self._lane is not None and self._socket is not None:
            with suppress(OSError):  # The client has closed it.
                self._socket.shutdown(socket.SHUT_RDWR)

    def _close_socket(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

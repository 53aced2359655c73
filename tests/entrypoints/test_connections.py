# SPDX-License-Identifier: Apache-2.0
"""Large responses leave on threads, whole and in order, whatever their clients do."""

import asyncio
import gc
import os
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import uvicorn
import uvloop

from tests.support.waiting import until
from vllm.entrypoints.serve.capture import connections, sending
from vllm.entrypoints.serve.capture.connections import (
    SMALL,
    Connection,
    Lane,
    Protocol,
    send_on_threads,
)
from vllm.entrypoints.serve.capture.sending import RowsResponse, counting_unsent
from vllm.v1.capture.frontend.request_tracker import HeldBytes

WAIT = 60.0
LARGE = 40 << 20
"""Bytes that no socket buffers."""
SIZES = (10, 3 * SMALL, 10, LARGE, SMALL + 1, 100)
BODY = np.random.default_rng(0).integers(0, 256, sum(SIZES), np.uint8)


class Served:
    """An application that responds with `BODY` in pieces, on a server in a thread."""

    def __init__(self) -> None:
        self.unsent = HeldBytes()
        self._memory: list[weakref.ref[Any]] = []
        self.url = ""

    @property
    def living(self) -> int:
        """How many responses are in memory."""
        gc.collect()
        return sum(one() is not None for one in self._memory)

    @property
    def place(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").partition(":")
        return host, int(port)

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/rows":
            await counting_unsent(self.rows)(scope, receive, send)
        elif scope["path"] == "/uncounted":
            await self.respond(scope, receive, send)
        else:
            head = {"type": "http.response.start", "status": 200, "headers": []}
            await send(head)
            await send({"type": "http.response.body", "body": b"ok"})

    async def rows(self, scope: Any, receive: Any, send: Any) -> None:
        self.unsent.put_until_sent({"inline": len(BODY)})
        await self.respond(scope, receive, send)

    async def respond(self, scope: Any, receive: Any, send: Any) -> None:
        memory = BODY.copy()
        self._memory.append(weakref.ref(memory))
        view = memoryview(memory)
        del memory

        async def pieces() -> Any:
            start = 0
            for size in SIZES:
                yield view[start : start + size]
                start += size

        headers = {"Content-Length": str(len(BODY))}
        await RowsResponse(pieces(), headers=headers)(scope, receive, send)

    def is_free(self) -> bool:
        return not self.living and not self.unsent.of("inline", "unsent")


@contextmanager
def serving(http: Any) -> Iterator[Served]:
    served = Served()
    config = uvicorn.Config(
        served.app, port=0, http=http, interface="asgi3", log_level="critical"
    )
    server = uvicorn.Server(config)

    thread = threading.Thread(target=lambda: uvloop.run(server.serve()))
    thread.start()
    until(lambda: server.started)
    host, port = server.servers[0].sockets[0].getsockname()
    served.url = f"http://{host}:{port}"
    try:
        yield served
    finally:
        server.should_exit = server.force_exit = True
        thread.join()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(Protocol) as one:
        yield one


def is_body(data: bytes) -> bool:
    """Whether it is the body; pytest would show a difference of 40 MB for minutes."""
    return data == BODY.tobytes()


@pytest.mark.parametrize("path", ["/rows", "/uncounted"])
@pytest.mark.parametrize("http", [Protocol, "httptools"])
def test_bodies_arrive_whole_over_one_connection(http: Any, path: str) -> None:
    with serving(http) as served, httpx.Client(base_url=served.url) as client:
        for _ in range(3):
            assert is_body(client.get(path).content)
            assert client.get("/").content == b"ok"
        until(served.is_free)


def test_a_connection_is_closed_after_what_was_written(served: Served) -> None:
    """For a client that does not keep connections."""
    for request in ("GET /rows HTTP/1.0", "GET /rows HTTP/1.1\r\nConnection: close"):
        with socket.create_connection(served.place) as client:
            client.sendall(f"{request}\r\nHost: x\r\n\r\n".encode())
            with client.makefile("rb") as file:
                head, _, body = file.read().partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200") and is_body(body)


def test_the_event_loop_sends_nothing_large(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_threads: list[int] = []
    on_the_loop: list[int] = []
    send, write = Lane._send_all, Connection.write

    async def send_all(lane: Lane, to: Any, messages: Any) -> None:
        on_threads.append(sum(map(len, messages)))
        assert threading.current_thread().name == "capture-send"
        await send(lane, to, messages)

    def written(connection: Connection, data: Any) -> None:
        idle = connection._lane is None
        write(connection, data)
        if idle and connection._lane is None:
            on_the_loop.append(len(data))

    monkeypatch.setattr(Lane, "_send_all", send_all)
    monkeypatch.setattr(Connection, "write", written)
    assert is_body(httpx.get(f"{served.url}/rows").content)
    assert max(on_the_loop) <= SMALL
    assert sum(on_threads) > len(BODY) - 10 * SMALL


def test_a_client_that_reads_nothing_delays_no_other(served: Served) -> None:
    with socket.create_connection(served.place) as stuck:
        stuck.sendall(b"GET /rows HTTP/1.1\r\nHost: x\r\n\r\n")
        stuck.recv(100)
        with ThreadPoolExecutor(4) as pool:
            asked = [f"{served.url}/rows"] * 8
            for reply in pool.map(httpx.get, asked):
                assert is_body(reply.content)
        assert served.living
    until(served.is_free)


@pytest.mark.parametrize("http", [Protocol, "httptools"])
def test_a_client_that_disconnects_frees_its_rows(http: Any) -> None:
    with serving(http) as served:
        for _ in range(3):
            with socket.create_connection(served.place) as client:
                client.sendall(b"GET /rows HTTP/1.1\r\nHost: x\r\n\r\n")
                client.recv(100)
            until(served.is_free)
        assert is_body(httpx.get(f"{served.url}/rows").content)


def test_a_client_that_reads_nothing_is_disconnected_and_its_rows_are_freed(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "STALL_SECONDS", 0.5)
    with socket.create_connection(served.place, timeout=WAIT) as stuck:
        stuck.sendall(b"GET /rows HTTP/1.1\r\nHost: x\r\n\r\n")
        until(lambda: served.living)
        until(served.is_free)
        received = 0
        with suppress(ConnectionResetError):
            while count := len(stuck.recv(1 << 20)):
                received += count
    assert received < len(BODY)  # Which its head has promised.


def test_a_client_that_reads_slowly_is_served(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "STALL_SECONDS", 20.0)
    with socket.create_connection(served.place, timeout=WAIT) as slow:
        slow.sendall(b"GET /rows HTTP/1.0\r\nHost: x\r\n\r\n")
        data = bytearray()
        while piece := slow.recv(1 << 20):
            data += piece
            time.sleep(0.02)
    assert is_body(bytes(data).partition(b"\r\n\r\n")[2])


def test_descriptors_are_given_back(served: Served) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    httpx.get(f"{served.url}/rows")
    before = descriptors()
    for _ in range(5):
        httpx.get(f"{served.url}/rows")
    until(lambda: descriptors() <= before)


class Transport:
    """What an event loop makes, without a socket."""

    def __init__(self, **extra: Any) -> None:
        self.extra, self.written = extra, []
        self.protocol = SimpleNamespace(pause_writing=None, resume_writing=None)

    def get_extra_info(self, name: str) -> Any:
        return self.extra.get(name)

    def write(self, data: Any) -> None:
        self.written.append(data)


def test_encrypted_connections_are_left_to_the_event_loop() -> None:
    async def run() -> None:
        with socket.socket() as plain:
            for extra in ({"socket": plain, "sslcontext": object()}, {}):
                transport = Transport(**extra)
                connection = Connection(transport, transport.protocol)
                assert not connection.uses_threads
                connection.write(BODY.data)
                await connection.drain()
                assert transport.written == [BODY.data]

    asyncio.run(run())


def test_only_a_server_that_captures_has_such_connections() -> None:
    captures = SimpleNamespace(args=SimpleNamespace(capture_consumers=["inline"]))
    does_not = SimpleNamespace(args=SimpleNamespace(capture_consumers=None))
    for state in (captures, does_not, SimpleNamespace()):
        config = uvicorn.Config(lambda: None)
        send_on_threads(config, SimpleNamespace(state=state))  # type: ignore[arg-type]
        assert (config.http is Protocol) == (state is captures)


def test_a_process_without_descriptors_sends_on_the_event_loop(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(number: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(connections.os, "dup", fail)
    assert is_body(httpx.get(f"{served.url}/rows").content)

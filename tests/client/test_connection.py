# SPDX-License-Identifier: Apache-2.0
"""Connections that read large responses to where they stay, and their bounds."""

import asyncio
import select
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from clearbox_client import AsyncClient, ClearboxError
from clearbox_client.connection import Connections, socket_of

from tests.client._answering import served
from tests.client._server import LARGE, Handler


@pytest.fixture
def connections(url: str) -> Iterator[Connections]:
    opened = Connections(url, {}, 30, 1 << 30)
    yield opened
    opened.close()


def post(connections: Connections, path: str, text: bytes = b"x") -> Any:
    with connections.ask("POST", path, text) as answer:
        return answer.read()


def test_bodies_arrive_whole_over_one_connection(
    connections: Connections, handler: type[Handler]
) -> None:
    for text in (b"a", "é".encode() * 1000):
        assert post(connections, "/", text) == text + LARGE
    assert len(handler.connections) == 1


def test_rows_are_received_where_they_stay(
    connections: Connections, handler: type[Handler]
) -> None:
    for _ in range(2):
        content = post(connections, "/rows")
        assert isinstance(content, memoryview) and not content.readonly
        assert content == LARGE
    assert len(handler.connections) == 1


def test_rows_that_end_early_are_errors(connections: Connections) -> None:
    for path in ("/cut", "/short"):
        with pytest.raises(ClearboxError, match="IncompleteRead") as caught:
            post(connections, path)
        assert caught.value.status == 0
    assert post(connections, "/") == b"x" + LARGE


def test_threads_have_connections_of_their_own(connections: Connections) -> None:
    texts = [str(number).encode() for number in range(16)]
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda text: post(connections, "/", text), texts)
        assert list(found) == [text + LARGE for text in texts]


def test_a_stream_arrives_while_it_is_sent(
    connections: Connections, handler: type[Handler]
) -> None:
    with connections.ask("POST", "/stream", b"x") as answer:
        events = answer.events()
        assert next(events) == 1  # The rest is sent only after this.
        handler.more.set()
        assert list(events) == [2]
    assert post(connections, "/") == b"x" + LARGE
    assert len(handler.connections) == 1


def test_a_stream_that_is_left_early_spoils_no_later_request(
    connections: Connections, handler: type[Handler]
) -> None:
    with connections.ask("POST", "/stream", b"x") as answer:
        next(answer.events())
    handler.more.set()
    assert post(connections, "/") == b"x" + LARGE


def test_a_connection_that_the_server_has_closed_is_not_used_again(
    connections: Connections,
) -> None:
    for _ in range(3):
        assert post(connections, "/closes") == b"ok"
        (idle,) = connections._idle
        closed = select.select([socket_of(idle)], [], [], 30)[0]
        assert closed, "the server has not closed it"


def test_proxies_of_the_environment_are_used(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This server answers a proxy's requests, which name the whole address."""
    for name in ("http_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("http_proxy", url)
    away = Connections("http://example.invalid", {}, 5, 1 << 30)
    assert post(away, "/rows") == b"x" + LARGE  # Its path is not "/rows".
    monkeypatch.setenv("no_proxy", "example.invalid")
    with pytest.raises(ClearboxError):
        post(Connections("http://example.invalid", {}, 5, 1 << 30), "/")


class Raw:
    """A server that sends what `send` yields, whatever is asked."""

    def __init__(self, send: Any) -> None:
        self._send = send
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(peer,), daemon=True).start()

    def _answer(self, peer: socket.socket) -> None:
        with peer:
            peer.recv(1 << 16)
            try:
                for piece in self._send():
                    peer.sendall(piece)
            except OSError:
                pass

    def close(self) -> None:
        self._listener.close()


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


def repeating(begin: bytes, piece: bytes, pause: float = 0.0) -> Any:
    def send() -> Iterator[bytes]:
        yield begin
        while True:
            time.sleep(pause)
            yield piece

    return send


def dripping(begin: bytes, drop: bytes) -> Any:
    return repeating(begin, drop, 0.05)


CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
CHUNK = b"10000\r\n" + b" " * 65536 + b"\r\n"


@pytest.mark.parametrize(
    "send",
    [
        dripping(b"", b""),
        dripping(b"HTTP/1.1 200", b" "),
        dripping(HEAD, b"X-Drop: 1\r\n"),
        dripping(HEAD + b"Content-Length: 100000\r\n\r\n", b" "),
        dripping(CHUNKED, b"1\r\n \r\n"),
        dripping(
            HEAD.replace(b"json", b"safetensors") + b"Content-Length: 100000\r\n\r\n",
            b" ",
        ),
    ],
    ids=["silence", "status", "head", "body", "chunks", "rows"],
)
def test_the_time_bounds_the_whole_answer(send: Any) -> None:
    server = Raw(send)
    begin = time.monotonic()
    with pytest.raises(ClearboxError, match="TimeoutError|LineTooLong"):
        post(Connections(server.url, {}, 0.5, 1 << 20), "/")
    assert time.monotonic() - begin < 5
    server.close()


def test_a_streams_comments_do_not_prolong_it() -> None:
    server = Raw(dripping(CHUNKED, b"8\r\n: alive\n\r\n"))
    begin = time.monotonic()
    connections = Connections(server.url, {}, 0.5, 1 << 20)
    with (
        pytest.raises(ClearboxError, match="TimeoutError"),
        connections.ask("POST", "/", b"") as answer,
    ):
        list(answer.events())
    assert time.monotonic() - begin < 5
    server.close()


@pytest.mark.parametrize("rest", [b"8\r\ndata", b"", b"0\r\n\r\n"])
def test_a_stream_that_is_cut_is_no_whole_one(rest: bytes) -> None:
    """Also between two chunks, or by a proxy that ends them."""
    server = Raw(lambda: iter([CHUNKED + b"8\r\ndata: 1\n\r\n", rest]))
    connections = Connections(server.url, {}, 5, 1 << 20)
    with (
        pytest.raises(ClearboxError, match="IncompleteRead"),
        connections.ask("POST", "/", b"") as answer,
    ):
        list(answer.events())
    server.close()


@pytest.mark.parametrize(
    "send",
    [
        repeating(HEAD + b"\r\n", b" " * 65536),
        repeating(CHUNKED, CHUNK),
        repeating(HEAD + b"Content-Length: 99999999999\r\n\r\n", b" " * 65536),
    ],
    ids=["until the end", "chunks", "said"],
)
def test_the_bytes_of_an_answer_are_bounded(send: Any) -> None:
    server = Raw(send)
    connections = Connections(server.url, {}, 30, 1 << 23)
    with pytest.raises(ClearboxError, match="larger than 1048576 bytes") as caught:
        post(connections, "/")
    assert caught.value.remedy is not None and "max_bytes" in caught.value.remedy
    with (
        pytest.raises(ClearboxError, match="larger than"),
        connections.ask("POST", "/", b"") as answer,
    ):
        list(answer.events())
    server.close()


def test_what_is_compressed_is_not_unpacked(connections: Connections) -> None:
    with pytest.raises(ClearboxError, match="compressed"):
        post(connections, "/packed")


def test_many_requests_run_at_once_and_other_tasks_have_turns(url: str) -> None:
    async def run() -> list[float]:
        async with AsyncClient(url, model="m") as client:
            asking = [
                asyncio.ensure_future(client._run(post, client._client._http, "/rows"))
                for _ in range(40)
            ]
            busy = []
            while not all(task.done() for task in asking):
                begin = time.thread_time()
                await asyncio.sleep(0)
                busy.append(time.thread_time() - begin)
            for content in await asyncio.gather(*asking):
                assert content == LARGE
            return busy

    busy = asyncio.run(asyncio.wait_for(run(), 200))
    assert len(busy) > 8 and max(busy) < 0.5


def test_a_cancelled_call_closes_its_connection(url: str) -> None:
    async def run() -> None:
        async with AsyncClient(url, model="m") as client:
            http = client._client._http
            begin = time.monotonic()
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(client._run(post, http, "/slow"), 0.5)
            assert await client._run(post, http, "/rows") == LARGE
            client._threads.shutdown(wait=True)  # No thread waits for the server.
            assert time.monotonic() - begin < 20

    asyncio.run(run())


def test_a_cancelled_call_of_many_prompts_sends_no_more_of_them() -> None:
    sent: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(request)
        time.sleep(0.2)
        return httpx.Response(200, json={"choices": [{"index": 0, "text": "a"}]})

    async def run(url: str) -> None:
        async with AsyncClient(url, model="m") as client:
            asked = client.complete_many(["x"] * 40, concurrency=2, progress=False)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(asked, 0.5)
            client._threads.shutdown(wait=True)

    with served(answer) as url:
        asyncio.run(run(url))
    assert len(sent) < 20


def test_a_stream_that_is_left_early_closes_its_connection() -> None:
    event = b'data: {"choices": [{"index": 0, "text": "a"}]}\n\n'
    hung_up = threading.Event()

    def send() -> Iterator[bytes]:
        yield HEAD + b"\r\n"
        try:
            while True:
                yield event
                time.sleep(0.01)
        finally:
            hung_up.set()

    server = Raw(send)

    async def run() -> None:
        async with AsyncClient(server.url, model="m") as client:
            chunks = client.stream("x")
            async for chunk in chunks:
                assert chunk.text == "a"
                break
            await client.close()  # As an interpreter may that collects the stream late.
            await chunks.aclose()
            assert await asyncio.to_thread(hung_up.wait, 10)

    asyncio.run(run())
    server.close()

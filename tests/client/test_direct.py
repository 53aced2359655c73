# SPDX-License-Identifier: Apache-2.0
"""Connections that read large responses in one piece."""

import select
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from clearbox_client.direct import DirectTransport, transport_for

LARGE = bytes(range(256)) * 20_000


class Handler(BaseHTTPRequestHandler):
    """Answers by path."""

    protocol_version = "HTTP/1.1"
    connections: set[Any]
    more: threading.Event

    def do_POST(self) -> None:
        self.connections.add(self.client_address)
        given = self.rfile.read(int(self.headers["content-length"]))
        if self.path == "/stream":
            self._stream()
        elif self.path == "/short":
            self._head(len(LARGE))
            self.wfile.write(LARGE[:1000])
            self.close_connection = True
        elif self.path == "/closes":
            self._head(2)
            self.wfile.write(b"ok")
            self.close_connection = True  # Without saying so in the head.
        elif self.path == "/silent":
            self.more.wait(30)
        else:
            self._head(len(given) + len(LARGE))
            self.wfile.write(given + LARGE)

    def _head(self, length: int) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def _stream(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for piece in (b"data: 1\n\n", b"data: 2\n\n"):
            self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            self.wfile.flush()
            self.more.wait(30)
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@pytest.fixture
def handler() -> type[Handler]:
    return type("Own", (Handler,), {"connections": set(), "more": threading.Event()})


@pytest.fixture
def client(handler: type[Handler]) -> Iterator[httpx.Client]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    with httpx.Client(base_url=url, transport=DirectTransport()) as opened:
        yield opened
    handler.more.set()
    server.shutdown()
    server.server_close()


def test_bodies_arrive_whole_over_one_connection(
    client: httpx.Client, handler: type[Handler]
) -> None:
    for text in ("a", "é" * 1000):
        assert client.post("/", content=text).content == text.encode() + LARGE
    assert len(handler.connections) == 1


def test_threads_have_connections_of_their_own(client: httpx.Client) -> None:
    texts = [str(number) for number in range(16)]
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda text: client.post("/", content=text).content, texts)
        assert list(found) == [text.encode() + LARGE for text in texts]


def test_a_stream_arrives_while_it_is_sent(
    client: httpx.Client, handler: type[Handler]
) -> None:
    with client.stream("POST", "/stream", content="x") as response:
        lines = response.iter_lines()
        assert next(lines) == "data: 1"  # The rest is sent only after this.
        handler.more.set()
        assert [line for line in lines if line] == ["data: 2"]
    assert client.post("/", content="x").content == b"x" + LARGE


def test_a_stream_that_is_left_early_spoils_no_later_request(
    client: httpx.Client, handler: type[Handler]
) -> None:
    with client.stream("POST", "/stream", content="x") as response:
        next(response.iter_lines())
    handler.more.set()
    assert client.post("/", content="x").content == b"x" + LARGE


def test_a_connection_that_the_server_has_closed_is_not_used_again(
    client: httpx.Client,
) -> None:
    transport = client._transport
    assert isinstance(transport, DirectTransport)
    for _ in range(3):
        assert client.post("/closes", content="x").content == b"ok"
        (idle,) = transport._idle
        assert select.select([idle.sock], [], [], 30)[0], "the server has not closed it"


def test_failures_are_those_of_httpx(client: httpx.Client) -> None:
    with pytest.raises(httpx.RemoteProtocolError, match="IncompleteRead"):
        client.post("/short", content="x")
    with pytest.raises(httpx.ReadTimeout):
        client.post("/silent", content="x", timeout=0.2)
    with socket.socket() as unheard, pytest.raises(httpx.ConnectError):
        unheard.bind(("127.0.0.1", 0))  # It does not listen.
        url = f"http://127.0.0.1:{unheard.getsockname()[1]}"
        httpx.Client(transport=DirectTransport()).post(url)


def test_tls_and_proxies_are_left_to_httpx(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    assert transport_for("https://example.org") is None
    assert isinstance(transport_for("http://localhost:8000"), DirectTransport)
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    assert transport_for("http://example.org") is None
    monkeypatch.setenv("no_proxy", "localhost")
    assert isinstance(transport_for("http://localhost:8000"), DirectTransport)

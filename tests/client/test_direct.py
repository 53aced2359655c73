# SPDX-License-Identifier: Apache-2.0
"""Connections that read large responses in one piece."""

import select
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from clearbox_client.bulk import read
from clearbox_client.direct import DirectTransport, is_direct

from tests.client._server import LARGE, Handler


@pytest.fixture
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, transport=DirectTransport()) as opened:
        yield opened


def test_bodies_arrive_whole_over_one_connection(
    client: httpx.Client, handler: type[Handler]
) -> None:
    for text in ("a", "é" * 1000):
        assert client.post("/", content=text).content == text.encode() + LARGE
    assert len(handler.connections) == 1


def test_rows_are_received_where_they_stay(
    client: httpx.Client, handler: type[Handler]
) -> None:
    for _ in range(2):
        with client.stream("POST", "/rows", content="x") as response:
            content = read(response)
        assert isinstance(content, memoryview) and not content.readonly
        assert content == LARGE
    assert len(handler.connections) == 1


def test_a_body_in_another_form_is_read_as_usual(client: httpx.Client) -> None:
    for path, expected in (("/packed", LARGE), ("/", b"x" + LARGE)):
        with client.stream("POST", path, content="x") as response:
            assert read(response) == expected


def test_rows_that_end_early_or_late_are_errors(client: httpx.Client) -> None:
    cut = client.stream("POST", "/cut", content="x")
    told = pytest.raises(httpx.RemoteProtocolError, match="IncompleteRead")
    with told, cut as response:
        read(response)
    slow = client.stream("POST", "/slow", content="x", timeout=0.5)
    with pytest.raises(httpx.ReadTimeout), slow as response:
        read(response)
    assert client.post("/", content="x").content == b"x" + LARGE


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
    assert not is_direct("https://example.org")
    assert is_direct("http://localhost:8000")
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    assert not is_direct("http://example.org")
    monkeypatch.setenv("no_proxy", "localhost")
    assert is_direct("http://localhost:8000")

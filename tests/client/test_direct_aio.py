# SPDX-License-Identifier: Apache-2.0
"""Connections of an event loop that read large responses to where they stay."""

import asyncio
import socket
import time
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
import pytest
from clearbox_client.bulk import read_async
from clearbox_client.direct_aio import AsyncDirectTransport

from tests.client._server import LARGE, Handler

Run = Callable[[httpx.AsyncClient], Coroutine[Any, Any, None]]


def run(url: str, what: Run) -> None:
    async def within() -> None:
        transport = AsyncDirectTransport()
        async with httpx.AsyncClient(base_url=url, transport=transport) as client:
            await asyncio.wait_for(what(client), 200)
        assert not transport._idle

    asyncio.run(within())


async def rows(client: httpx.AsyncClient, path: str = "/rows", **more: Any) -> Any:
    async with client.stream("POST", path, content="x", **more) as response:
        return await read_async(response)


def test_bodies_arrive_whole_over_one_connection(
    url: str, handler: type[Handler]
) -> None:
    async def what(client: httpx.AsyncClient) -> None:
        for text in ("a", "é" * 1000):
            reply = await client.post("/", content=text)
            assert reply.content == text.encode() + LARGE
        for _ in range(2):
            content = await rows(client)
            assert isinstance(content, memoryview) and not content.readonly
            assert content == LARGE
        assert await rows(client, "/packed") == LARGE

    run(url, what)
    assert len(handler.connections) == 1


def test_many_requests_run_at_once(url: str) -> None:
    async def what(client: httpx.AsyncClient) -> None:
        for content in await asyncio.gather(*[rows(client) for _ in range(40)]):
            assert content == LARGE

    run(url, what)


def test_a_stream_arrives_while_it_is_sent(url: str, handler: type[Handler]) -> None:
    async def what(client: httpx.AsyncClient) -> None:
        async with client.stream("POST", "/stream", content="x") as response:
            lines = response.aiter_lines()
            assert await anext(lines) == "data: 1"  # The rest is sent only after this.
            handler.more.set()
            assert [line async for line in lines if line] == ["data: 2"]
        assert (await client.post("/", content="x")).content == b"x" + LARGE

    run(url, what)
    assert len(handler.connections) == 1


def test_what_is_left_early_spoils_no_later_request(
    url: str, handler: type[Handler]
) -> None:
    async def what(client: httpx.AsyncClient) -> None:
        async with client.stream("POST", "/stream", content="x") as response:
            await anext(response.aiter_lines())
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(rows(client, "/slow"), 0.5)
        handler.more.set()
        assert await rows(client) == LARGE

    run(url, what)


def test_other_tasks_have_turns_while_much_arrives(url: str) -> None:
    async def what(client: httpx.AsyncClient) -> None:
        receiving = [asyncio.ensure_future(rows(client)) for _ in range(8)]
        busy = []
        while not all(task.done() for task in receiving):
            begin = time.thread_time()
            await asyncio.sleep(0)
            busy.append(time.thread_time() - begin)
        assert len(busy) > 8
        assert max(busy) < 0.5

    run(url, what)


def test_a_connection_that_the_server_has_closed_is_not_used_again(url: str) -> None:
    async def what(client: httpx.AsyncClient) -> None:
        for _ in range(3):
            assert (await client.post("/closes", content="x")).content == b"ok"
            await asyncio.sleep(0.1)

    run(url, what)


def test_failures_are_those_of_httpx(url: str) -> None:
    async def what(client: httpx.AsyncClient) -> None:
        with pytest.raises(httpx.RemoteProtocolError, match="IncompleteRead"):
            await rows(client, "/cut")
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post("/short", content="x")
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/silent", content="x", timeout=0.2)
        with pytest.raises(httpx.ReadTimeout):
            await rows(client, "/slow", timeout=0.5)
        with socket.socket() as unheard, pytest.raises(httpx.ConnectError):
            unheard.bind(("127.0.0.1", 0))  # It does not listen.
            await client.post(f"http://127.0.0.1:{unheard.getsockname()[1]}")
        assert await rows(client) == LARGE

    run(url, what)

# SPDX-License-Identifier: Apache-2.0
"""The asynchronous client: the other one, on threads."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from clearbox_client.client import MAX_BYTES, Client
from clearbox_client.connection import CURRENT, Exchange
from clearbox_client.replies import Chunk
from clearbox_client.requests import Messages, Prompt

MOST_AT_ONCE = 256
"""Requests that run at once, each on a thread; others wait."""

T = TypeVar("T")
P = ParamSpec("P")
Method = Callable[Concatenate["AsyncClient", P], Coroutine[Any, Any, T]]


def _awaited(method: Callable[Concatenate[Client, P], T]) -> Method[P, T]:
    """The counterpart of a method of `Client`, with its parameters and docstring."""

    @wraps(method)
    async def run(self: "AsyncClient", *args: P.args, **named: P.kwargs) -> T:
        return await self._run(method, self._client, *args, **named)

    return run


class AsyncClient:
    """The counterpart of `Client` for an event loop.

    A cancelled call closes its connection, so that the server ends the request.
    """

    def __init__(
        self,
        url: str = "http://localhost:8000",
        model: str | None = None,
        api_key: str | None = None,
        timeout: float = 600.0,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """Open a client; the arguments are those of `Client`."""
        self._client = Client(url, model, api_key, timeout, max_bytes)
        self._threads = ThreadPoolExecutor(MOST_AT_ONCE, "clearbox")

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        self._threads.shutdown(wait=False)
        self._client.close()

    async def model(self) -> str:
        """The model's name; the server is asked once if none was given."""
        return await self._run(lambda: self._client.model)

    models = _awaited(Client.models)
    complete = _awaited(Client.complete)
    chat = _awaited(Client.chat)
    complete_many = _awaited(Client.complete_many)
    logprobs = _awaited(Client.logprobs)

    async def stream(
        self, prompt: Prompt | Messages, **fields: Any
    ) -> AsyncIterator[Chunk]:
        """Yield the chunks of a completion or of a chat; see `Client.stream`."""
        exchange = Exchange()
        chunks = self._client.stream(prompt, **fields)
        ask = partial(next, chunks, None)
        try:
            while (chunk := await self._run_in(exchange, ask)) is not None:
                yield chunk
        finally:
            exchange.abort()  # Does nothing to a stream that has ended.
            with suppress(ValueError):  # A thread that waits for a chunk closes it.
                chunks.close()

    tokenize = _awaited(Client.tokenize)
    token_texts = _awaited(Client.token_texts)
    patch_sweep = _awaited(Client.patch_sweep)
    drop_run = _awaited(Client.drop_run)
    capture_status = _awaited(Client.capture_status)
    steering = _awaited(Client.steering)
    modules = _awaited(Client.modules)
    set_steering = _awaited(Client.set_steering)
    clear_steering = _awaited(Client.clear_steering)
    register_module = _awaited(Client.register_module)
    unregister_module = _awaited(Client.unregister_module)
    readouts = _awaited(Client.readouts)
    register_probe = _awaited(Client.register_probe)
    register_sae = _awaited(Client.register_sae)
    unregister_readout = _awaited(Client.unregister_readout)

    async def _run(self, call: Callable[..., T], *args: Any, **named: Any) -> T:
        return await self._run_in(Exchange(), partial(call, *args, **named))

    async def _run_in(self, exchange: Exchange, call: Callable[[], T]) -> T:
        context = copy_context()
        context.run(CURRENT.set, exchange)
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads, context.run, call)
        except asyncio.CancelledError:
            exchange.abort()
            raise

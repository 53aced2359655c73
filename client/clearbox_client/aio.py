# SPDX-License-Identifier: Apache-2.0
"""The asynchronous client: the other one, on threads."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

from clearbox_client.client import MAX_BYTES, Client
from clearbox_client.connection import CURRENT, Exchange
from clearbox_client.replies import Chunk, Reply
from clearbox_client.requests import Messages, Prompt

MOST_AT_ONCE = 256
"""Requests that run at once, each on a thread; others wait."""

T = TypeVar("T")


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

    async def models(self) -> list[dict[str, Any]]:
        """What the server says of its models; see `Client.models`."""
        return await self._run(self._client.models)

    async def complete(
        self, prompt: Prompt, *, tokens: bool = False, **fields: Any
    ) -> Reply:
        """Complete a text or token ids; see `Client.complete`."""
        return await self._run(self._client.complete, prompt, tokens=tokens, **fields)

    async def chat(
        self, messages: Messages, *, tokens: bool = False, **fields: Any
    ) -> Reply:
        """Generate a chat's next message; arguments are those of `complete`."""
        return await self._run(self._client.chat, messages, tokens=tokens, **fields)

    async def complete_many(
        self,
        prompts: Sequence[Prompt | Messages],
        *,
        concurrency: int = 32,
        progress: bool = True,
        **fields: Any,
    ) -> list[Reply]:
        """Complete texts, token ids or chats, some at a time; see `Client`."""
        chosen = {"concurrency": concurrency, "progress": progress, **fields}
        return await self._run(self._client.complete_many, prompts, **chosen)

    async def logprobs(self, prompt: Prompt) -> list[tuple[str, float]]:
        """The log-probability of each token of a text; see `Client.logprobs`."""
        return await self._run(self._client.logprobs, prompt)

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
            self._threads.submit(_close, chunks)

    async def token_texts(self, token_ids: list[int]) -> list[str]:
        """The text of each token on its own."""
        return await self._run(self._client.token_texts, token_ids)

    async def patch_sweep(self, prompt: Prompt, **fields: Any) -> dict[str, Any]:
        """Run a patching sweep; see `Client.patch_sweep`."""
        return await self._run(self._client.patch_sweep, prompt, **fields)

    async def drop_run(self, run: str) -> bool:
        """Drop a run that is kept for patching; see `Client.drop_run`."""
        return await self._run(self._client.drop_run, run)

    async def capture_status(self) -> dict[str, Any]:
        """The server's consumers, limits, hook points and counters."""
        return await self._run(self._client.capture_status)

    async def steering(self) -> dict[str, Any]:
        """The global vectors, as `GET /v1/steering` returns them."""
        return await self._run(self._client.steering)

    async def modules(self) -> dict[str, Any]:
        """The named modules, as `GET /v1/steering/modules` returns them."""
        return await self._run(self._client.modules)

    async def set_steering(
        self, *, key: str | None = None, **fields: Any
    ) -> dict[str, Any]:
        """Set the global vectors: `vectors`, `prefill_vectors`, `decode_vectors`."""
        return await self._run(self._client.set_steering, key=key, **fields)

    async def clear_steering(self, *, key: str | None = None) -> dict[str, Any]:
        """Remove the global vectors; requests keep their own."""
        return await self._run(self._client.clear_steering, key=key)

    async def register_module(
        self, name: str, vectors: Mapping[str, Any], *, key: str | None = None
    ) -> dict[str, Any]:
        """Register vectors under a name, for `steering_name`."""
        return await self._run(self._client.register_module, name, vectors, key=key)

    async def unregister_module(
        self, name: str, *, key: str | None = None
    ) -> dict[str, Any]:
        """Unregister a named module."""
        return await self._run(self._client.unregister_module, name, key=key)

    async def readouts(self) -> dict[str, Any]:
        """The named probes, translators and SAEs, limits and counters."""
        return await self._run(self._client.readouts)

    async def register_probe(
        self, name: str, path: str, **options: Any
    ) -> dict[str, Any]:
        """Register a probe or a translator; see `Client.register_probe`."""
        return await self._run(self._client.register_probe, name, path, **options)

    async def register_sae(
        self, name: str, path: str, **options: Any
    ) -> dict[str, Any]:
        """Register a sparse autoencoder; see `Client.register_sae`."""
        return await self._run(self._client.register_sae, name, path, **options)

    async def unregister_readout(
        self, name: str, *, key: str | None = None
    ) -> dict[str, Any]:
        """Unregister a probe, a translator or an SAE."""
        return await self._run(self._client.unregister_readout, name, key=key)

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


def _close(chunks: Any) -> None:
    """Close the connection of a stream that was left early."""
    with suppress(ValueError):  # A thread that waits for the next chunk closes it.
        chunks.close()

# SPDX-License-Identifier: Apache-2.0
"""The asynchronous client."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any

import httpx
from clearbox_client.bulk import Content, accept_of, document_in, kind_of, read_async
from clearbox_client.client import connected, error_of
from clearbox_client.direct import is_direct
from clearbox_client.direct_aio import AsyncDirectTransport
from clearbox_client.errors import ClearboxError
from clearbox_client.replies import Chunk, Reply
from clearbox_client.requests import (
    Messages,
    Prompt,
    address_of,
    body_of,
    document_of,
    headers_of,
    plain,
)
from clearbox_client.shared import Mapped


class AsyncClient:
    """The counterpart of `Client` for an event loop."""

    def __init__(
        self,
        url: str = "http://localhost:8000",
        model: str | None = None,
        api_key: str | None = None,
        timeout: float = 600.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Open a client; the arguments are those of `Client`."""
        if transport is None and is_direct(url):
            transport = AsyncDirectTransport()
        self._http = httpx.AsyncClient(
            base_url=address_of(url),
            headers=headers_of(api_key),
            timeout=timeout,
            transport=transport,
        )
        self._model = model

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def model(self) -> str:
        """The model's name; the server is asked once if none was given."""
        if self._model is None:
            self._model = (await self.models())[0]["id"]
        return self._model

    async def models(self) -> list[dict[str, Any]]:
        """What the server says of its models; see `Client.models`."""
        answer: list[dict[str, Any]] = (await self._ask("GET", "/v1/models"))["data"]
        return answer

    async def complete(
        self, prompt: Prompt, *, tokens: bool = False, **fields: Any
    ) -> Reply:
        """Complete a text or token ids; see `Client.complete`."""
        return await self._reply(prompt, tokens, fields)

    async def chat(
        self, messages: Messages, *, tokens: bool = False, **fields: Any
    ) -> Reply:
        """Generate a chat's next message; arguments are those of `complete`."""
        return await self._reply(messages, tokens, fields)

    async def stream(
        self, prompt: Prompt | Messages, **fields: Any
    ) -> AsyncIterator[Chunk]:
        """Yield the chunks of a completion or of a chat; see `Client.stream`."""
        path, body = body_of(await self.model(), prompt, {**fields, "stream": True})
        with connected():
            async with self._http.stream("POST", path, json=body) as response:
                if response.is_error:
                    await response.aread()
                    raise error_of(response)
                async for line in response.aiter_lines():
                    document = document_of(line)
                    if document is not None:
                        if "error" in document:
                            raise ClearboxError.of(response.status_code, document)
                        await self._map_shared(document)
                        yield Chunk.of(document)

    async def token_texts(self, token_ids: list[int]) -> list[str]:
        """The text of each token on its own."""
        model, each = await self.model(), list(dict.fromkeys(token_ids))
        asked = (
            self._ask("POST", "/detokenize", json={"model": model, "tokens": [token]})
            for token in each
        )
        texts = dict(zip(each, await asyncio.gather(*asked)))
        return [texts[token]["prompt"] for token in token_ids]

    async def capture_status(self) -> dict[str, Any]:
        """The server's consumers, limits, hook points and counters."""
        answer: dict[str, Any] = await self._ask("GET", "/v1/capture")
        return answer

    async def steering(self) -> dict[str, Any]:
        """The global vectors, as `GET /v1/steering` returns them."""
        answer: dict[str, Any] = await self._ask("GET", "/v1/steering")
        return answer

    async def modules(self) -> dict[str, Any]:
        """The named modules, as `GET /v1/steering/modules` returns them."""
        answer: dict[str, Any] = await self._ask("GET", "/v1/steering/modules")
        return answer

    async def set_steering(
        self, *, key: str | None = None, **fields: Any
    ) -> dict[str, Any]:
        """Set the global vectors: `vectors`, `prefill_vectors`, `decode_vectors`."""
        return await self._steer("set", key, fields)

    async def clear_steering(self, *, key: str | None = None) -> dict[str, Any]:
        """Remove the global vectors; requests keep their own."""
        return await self._steer("clear", key, {})

    async def register_module(
        self, name: str, vectors: Mapping[str, Any], *, key: str | None = None
    ) -> dict[str, Any]:
        """Register vectors under a name, for `steering_name`."""
        fields = {"name": name, "vectors": vectors}
        return await self._steer("modules/register", key, fields)

    async def unregister_module(
        self, name: str, *, key: str | None = None
    ) -> dict[str, Any]:
        """Unregister a named module."""
        return await self._steer("modules/unregister", key, {"name": name})

    async def _steer(self, what: str, key: str | None, fields: Any) -> dict[str, Any]:
        path = f"/v1/steering/{what}"
        answer: dict[str, Any] = await self._ask(
            "POST", path, json=plain(fields), headers=headers_of(key)
        )
        return answer

    async def _reply(self, prompt: Any, tokens: bool, fields: Any) -> Reply:
        path, body = body_of(await self.model(), prompt, fields)
        document = await self._ask("POST", path, json=body, headers=accept_of(body))
        await self._map_shared(document)
        reply = Reply.of(document)
        if not tokens:
            return reply
        ids = [*(reply.prompt_token_ids or ()), *(reply.token_ids or ())]
        return Reply.of(document, await self.token_texts(ids))

    async def _map_shared(self, document: Any) -> None:
        mapped = Mapped()
        try:
            mapped.take(document)
        finally:
            for token in mapped.tokens:
                with suppress(ClearboxError):  # It is freed after a minute anyway.
                    await self._ask("DELETE", f"/v1/capture/shm/{token}")

    async def _ask(self, method: str, path: str, **more: Any) -> Any:
        return document_in(*await self._content(method, path, **more))

    async def _content(
        self, method: str, path: str, **more: Any
    ) -> tuple[Content, str]:
        with connected():
            async with self._http.stream(method, path, **more) as response:
                content = await read_async(response)
        if response.is_error:
            raise error_of(response)
        return content, kind_of(response)

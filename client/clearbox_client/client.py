# SPDX-License-Identifier: Apache-2.0
"""The synchronous client."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import httpx
from clearbox_client.bulk import Content, accept_of, document_in, kind_of, read
from clearbox_client.direct import DirectTransport, is_direct
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


class Client:
    """A client of one server; safe to use from several threads."""

    def __init__(
        self,
        url: str = "http://localhost:8000",
        model: str | None = None,
        api_key: str | None = None,
        timeout: float = 600.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """Open a client; no request is sent yet.

        Args:
            url: the server's address, without a path.
            model: the model's name on the server; by default its only model.
            api_key: the server's key, if it has one.
            timeout: most seconds for a response.
            transport: an httpx transport, for tests; without one, servers without TLS
                are read by `DirectTransport`, unless the environment names a proxy.

        """
        if transport is None and is_direct(url):
            transport = DirectTransport()
        self._http = httpx.Client(
            base_url=address_of(url),
            headers=headers_of(api_key),
            timeout=timeout,
            transport=transport,
        )
        self._model = model

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    @property
    def model(self) -> str:
        """The model's name; the server is asked once if none was given."""
        if self._model is None:
            self._model = self.models()[0]["id"]
        return self._model

    def models(self) -> list[dict[str, Any]]:
        """What the server says of its models: `id`, `root`, `max_model_len`."""
        answer: list[dict[str, Any]] = self._ask("GET", "/v1/models")["data"]
        return answer

    def complete(self, prompt: Prompt, *, tokens: bool = False, **fields: Any) -> Reply:
        """Complete a text or token ids.

        Args:
            prompt: the text, or token ids.
            tokens: whether rows get the texts of their tokens, which costs another
                request.
            fields: fields of the OpenAI interface, and `capture`, `readouts`,
                `steering_vectors`, `steering_name` and all others that the server
                accepts.

        Raises:
            ClearboxError: the server has refused the request.

        """
        return self._reply(prompt, tokens, fields)

    def chat(self, messages: Messages, *, tokens: bool = False, **fields: Any) -> Reply:
        """Generate a chat's next message; arguments are those of `complete`."""
        return self._reply(messages, tokens, fields)

    def stream(self, prompt: Prompt | Messages, **fields: Any) -> Iterator[Chunk]:
        """Yield the chunks of a completion, or of a chat if `prompt` lists messages.

        Raises:
            ClearboxError: the server has refused the request, or fails during the
                stream.

        """
        path, body = body_of(self.model, prompt, {**fields, "stream": True})
        with connected(), self._http.stream("POST", path, json=body) as response:
            if response.is_error:
                response.read()
                raise error_of(response)
            for line in response.iter_lines():
                document = document_of(line)
                if document is not None:
                    if "error" in document:
                        raise ClearboxError.of(response.status_code, document)
                    self._map_shared(document)
                    yield Chunk.of(document)

    def token_texts(self, token_ids: list[int]) -> list[str]:
        """The text of each token on its own."""
        texts = {}
        for token in dict.fromkeys(token_ids):
            body = {"model": self.model, "tokens": [token]}
            texts[token] = self._ask("POST", "/detokenize", json=body)["prompt"]
        return [texts[token] for token in token_ids]

    def capture_status(self) -> dict[str, Any]:
        """The server's consumers, limits, hook points and counters."""
        answer: dict[str, Any] = self._ask("GET", "/v1/capture")
        return answer

    def steering(self) -> dict[str, Any]:
        """The global vectors, as `GET /v1/steering` returns them."""
        answer: dict[str, Any] = self._ask("GET", "/v1/steering")
        return answer

    def modules(self) -> dict[str, Any]:
        """The named modules, as `GET /v1/steering/modules` returns them."""
        answer: dict[str, Any] = self._ask("GET", "/v1/steering/modules")
        return answer

    def set_steering(self, *, key: str | None = None, **fields: Any) -> dict[str, Any]:
        """Set the global vectors: `vectors`, `prefill_vectors`, `decode_vectors`."""
        return self._steer("set", key, fields)

    def clear_steering(self, *, key: str | None = None) -> dict[str, Any]:
        """Remove the global vectors; requests keep their own."""
        return self._steer("clear", key, {})

    def register_module(
        self, name: str, vectors: Mapping[str, Any], *, key: str | None = None
    ) -> dict[str, Any]:
        """Register vectors under a name, for `steering_name`."""
        fields = {"name": name, "vectors": vectors}
        return self._steer("modules/register", key, fields)

    def unregister_module(self, name: str, *, key: str | None = None) -> dict[str, Any]:
        """Unregister a named module."""
        return self._steer("modules/unregister", key, {"name": name})

    def _steer(self, what: str, key: str | None, fields: Any) -> dict[str, Any]:
        path = f"/v1/steering/{what}"
        answer: dict[str, Any] = self._ask(
            "POST", path, json=plain(fields), headers=headers_of(key)
        )
        return answer

    def _reply(self, prompt: Any, tokens: bool, fields: Any) -> Reply:
        path, body = body_of(self.model, prompt, fields)
        document = self._ask("POST", path, json=body, headers=accept_of(body))
        self._map_shared(document)
        reply = Reply.of(document)
        if not tokens:
            return reply
        ids = [*(reply.prompt_token_ids or ()), *(reply.token_ids or ())]
        return Reply.of(document, self.token_texts(ids))

    def _map_shared(self, document: Any) -> None:
        """Map rows in shared memory, which the server need not keep any longer."""
        mapped = Mapped()
        try:
            mapped.take(document)
        finally:
            for token in mapped.tokens:
                with suppress(ClearboxError):  # It is freed after a minute anyway.
                    self._ask("DELETE", f"/v1/capture/shm/{token}")

    def _ask(self, method: str, path: str, **more: Any) -> Any:
        return document_in(*self._content(method, path, **more))

    def _content(self, method: str, path: str, **more: Any) -> tuple[Content, str]:
        """The body of a response, and its media type."""
        with connected(), self._http.stream(method, path, **more) as response:
            content = read(response)
        if response.is_error:
            raise error_of(response)
        return content, kind_of(response)


@contextmanager
def connected() -> Iterator[None]:
    """Convert failures of the connection to `ClearboxError`.

    Raises:
        ClearboxError: with status 0.

    """
    try:
        yield
    except httpx.TransportError as error:
        message = (
            f"the server does not answer: {error!r}; start it, or pass its address as "
            "url"
        )
        raise ClearboxError(message, 0, "url", None) from error


def error_of(response: httpx.Response) -> ClearboxError:
    """The error that a response reports."""
    try:
        body = response.json()
    except ValueError:
        body = {"message": response.text}
    return ClearboxError.of(response.status_code, body)

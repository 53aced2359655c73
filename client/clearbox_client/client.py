# SPDX-License-Identifier: Apache-2.0
"""The synchronous client."""

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import quote

import numpy as np
from clearbox_client.bulk import accept_of, document_in
from clearbox_client.connection import Answer, Connections
from clearbox_client.errors import ClearboxError, InputError, understood
from clearbox_client.many import run_many
from clearbox_client.replies import Chunk, Reply
from clearbox_client.requests import (
    Messages,
    Prompt,
    address_of,
    body_of,
    encoded,
    headers_of,
    plain,
)
from clearbox_client.shared import Mapped

MAX_BYTES = 4 << 30

T = TypeVar("T")


def _refuse_text(given: object, name: str, form: str) -> None:
    if isinstance(given, str):
        message = f"{name} must be a list, such as {form}; complete takes a text"
        raise InputError(message, name, given)


class Client:
    """A client of one server; safe to use from several threads."""

    def __init__(
        self,
        url: str = "http://localhost:8000",
        model: str | None = None,
        api_key: str | None = None,
        timeout: float = 600.0,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """Open a client; no request is sent yet.

        Args:
            url: the server's address, without a path.
            model: the model's name on the server; by default its only model.
            api_key: the server's key, if it has one.
            timeout: most seconds for a whole response, and for each chunk of a stream.
            max_bytes: most bytes of a response with rows; other responses and chunks
                may have an eighth of it.

        """
        self._http = Connections(
            address_of(url), headers_of(api_key), timeout, max_bytes
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
            models = self.models()
            with understood(200):
                self._model = str(models[0]["id"])
        return self._model

    def models(self) -> list[dict[str, Any]]:
        """What the server says of its models: `id`, `root`, `max_model_len`."""
        answer = self._ask("GET", "/v1/models")
        with understood(200):
            models: list[dict[str, Any]] = answer["data"]
        return models

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
        _refuse_text(messages, "messages", '[{"role": "user", "content": ...}]')
        return self._reply(messages, tokens, fields)

    def complete_many(
        self,
        prompts: Sequence[Prompt | Messages],
        *,
        concurrency: int = 32,
        progress: bool = True,
        **fields: Any,
    ) -> list[Reply]:
        """Complete texts, token ids or chats, some at a time.

        Args:
            prompts: the prompts.
            concurrency: requests at once.
            progress: whether a terminal shows a bar.
            fields: as of `complete`, for all of them.

        Returns:
            The replies, in the order of the prompts.

        Raises:
            ClearboxError: the server has refused a request; those that wait are not
                sent.

        """
        _refuse_text(prompts, "prompts", '["a text"]')
        _ = self.model  # Asked once, not by each thread.

        def ask(prompt: Prompt | Messages) -> Reply:
            return self._reply(prompt, False, fields)

        return run_many(ask, prompts, concurrency, progress)

    def logprobs(self, prompt: Prompt) -> list[tuple[str, float]]:
        """The natural log-probability of each token of a text, given those before it.

        Returns:
            `(token, log-probability)`; that of the first is NaN, as nothing precedes
            it.

        """
        reply = self._reply(prompt, False, {"max_tokens": 1, "prompt_logprobs": 0})
        with understood(200):
            (choice,) = reply.raw["choices"]
            told = choice["prompt_logprobs"]
            first = self.token_texts(choice["prompt_token_ids"][:1])
            rest = [next(iter(one.values())) for one in told[1:]]
            values = [(one["decoded_token"], float(one["logprob"])) for one in rest]
        return [(first[0], float("nan")), *values]

    def stream(
        self, prompt: Prompt | Messages, **fields: Any
    ) -> Generator[Chunk, None, None]:
        """Yield the chunks of a completion, or of a chat if `prompt` lists messages.

        Raises:
            ClearboxError: the server has refused the request, or fails during the
                stream.

        """

        def chunk_of(status: int, document: dict[str, Any]) -> Chunk:
            if "error" in document:
                raise ClearboxError.of(status, document)
            self._map_shared(document)
            return Chunk.of(document)

        path, body = body_of(self.model, prompt, {**fields, "stream": True})
        yield from self._events(path, body, chunk_of)

    def patch_events(
        self, prompt: Prompt, **fields: Any
    ) -> Generator[dict[str, Any], None, None]:
        """Yield the events of a patching sweep: `start`, a `cell` each, `summary`.

        Args:
            prompt: the prompt that is patched: text, or token ids.
            fields: those of `POST /v1/patch_sweep`, such as `clean_prompt`, `answer`,
                `foil`, `metric`, `hooks`, `layers` and `positions`.

        Raises:
            ClearboxError: the server has refused the sweep, or fails during it.

        """
        given = {name: one for name, one in fields.items() if one is not None}
        prompt = prompt if isinstance(prompt, str) else [*prompt]
        body = {**plain(given), "model": self.model, "prompt": prompt, "stream": True}

        def checked(status: int, event: dict[str, Any]) -> dict[str, Any]:
            if "type" not in event:
                raise ClearboxError.of(status, event)
            return event

        yield from self._events("/v1/patch_sweep", body, checked)

    def patch_sweep(self, prompt: Prompt, **fields: Any) -> dict[str, Any]:
        """Run a patching sweep; the arguments are those of `patch_events`.

        Returns:
            The summary, with `values`: by hook point, a float32 array `[layers,
            positions]` or `[layers, heads, positions]`, NaN where there is no value.

        Raises:
            ClearboxError: the server has refused the sweep, or fails during it.

        """
        *_, last = self.patch_events(prompt, **fields)
        with understood(200):
            grids = {one["hook"]: one["grid"] for one in last["hook_grids"]}
            values = {hook: np.array(one, np.float32) for hook, one in grids.items()}
        return {**last, "values": values}

    def drop_run(self, run: str) -> bool:
        """Drop a run that is kept for patching; returns whether there was one."""
        try:
            self._ask("DELETE", f"/v1/patch_source/{quote(run, safe='')}")
        except ClearboxError as error:
            if error.status != 404:
                raise
            return False
        return True

    def tokenize(self, text: str, special: bool = True) -> list[int]:
        """The token ids of a text; `special` adds those that begin a prompt."""
        body = {"model": self.model, "prompt": text, "add_special_tokens": special}
        answer = self._ask("POST", "/tokenize", body)
        with understood(200):
            return [int(token) for token in answer["tokens"]]

    def token_texts(self, token_ids: list[int]) -> list[str]:
        """The text of each token on its own."""
        texts = {}
        for token in dict.fromkeys(token_ids):
            body = {"model": self.model, "tokens": [token]}
            answer = self._ask("POST", "/detokenize", body)
            with understood(200):
                texts[token] = str(answer["prompt"])
        return [texts[token] for token in token_ids]

    def capture_status(self) -> dict[str, Any]:
        """The server's consumers, limits, hook points and counters."""
        return self._ask("GET", "/v1/capture")

    def steering(self) -> dict[str, Any]:
        """The global vectors, as `GET /v1/steering` returns them."""
        return self._ask("GET", "/v1/steering")

    def modules(self) -> dict[str, Any]:
        """The named modules, as `GET /v1/steering/modules` returns them."""
        return self._ask("GET", "/v1/steering/modules")

    def set_steering(self, *, key: str | None = None, **fields: Any) -> dict[str, Any]:
        """Set the global vectors: `vectors`, `prefill_vectors`, `decode_vectors`."""
        return self._change("/v1/steering/set", key, fields)

    def clear_steering(self, *, key: str | None = None) -> dict[str, Any]:
        """Remove the global vectors; requests keep their own."""
        return self._change("/v1/steering/clear", key, {})

    def register_module(
        self, name: str, vectors: Mapping[str, Any], *, key: str | None = None
    ) -> dict[str, Any]:
        """Register vectors under a name, for `steering_name`."""
        fields = {"name": name, "vectors": vectors}
        return self._change("/v1/steering/modules/register", key, fields)

    def unregister_module(self, name: str, *, key: str | None = None) -> dict[str, Any]:
        """Unregister a named module."""
        return self._change("/v1/steering/modules/unregister", key, {"name": name})

    def readouts(self) -> dict[str, Any]:
        """The named probes, translators and SAEs, limits and counters."""
        return self._ask("GET", "/v1/readouts")

    def register_probe(
        self, name: str, path: str, *, replace: bool = False, key: str | None = None
    ) -> dict[str, Any]:
        """Register a probe or a translator from a file on the server."""
        fields = {"name": name, "path": path, "replace": replace}
        return self._change("/v1/readouts/modules/register", key, fields)

    def register_sae(
        self,
        name: str,
        path: str,
        *,
        layer: int | None = None,
        hook: str | None = None,
        replace: bool = False,
        key: str | None = None,
    ) -> dict[str, Any]:
        """Register a sparse autoencoder from a file or folder on the server.

        `layer` and `hook` are for files that do not name their place.
        """
        fields = {"name": name, "path": path, "replace": replace}
        place = {"layer": layer, "hook": hook}
        fields |= {name: one for name, one in place.items() if one is not None}
        return self._change("/v1/sae/register", key, fields)

    def unregister_readout(
        self, name: str, *, key: str | None = None
    ) -> dict[str, Any]:
        """Unregister a probe, a translator or an SAE."""
        modules = self.readouts()["modules"]
        kind = (
            "sae" if modules.get(name, {}).get("kind") == "sae" else "readouts/modules"
        )
        return self._change(f"/v1/{kind}/unregister", key, {"name": name})

    def _change(self, path: str, key: str | None, fields: Any) -> dict[str, Any]:
        return self._ask("POST", path, plain(fields), headers_of(key))

    def _reply(self, prompt: Any, tokens: bool, fields: Any) -> Reply:
        path, body = body_of(self.model, prompt, fields)
        document = self._ask("POST", path, body, accept_of(body))
        with understood(200):
            self._map_shared(document)
            reply = Reply.of(document)
            ids = [*(reply.prompt_token_ids or ()), *(reply.token_ids or ())]
        if not tokens:
            return reply
        texts = self.token_texts(ids)
        with understood(200):
            return Reply.of(document, texts)

    def _map_shared(self, document: Any) -> None:
        """Map rows in shared memory, which the server need not keep any longer."""
        mapped = Mapped()
        try:
            mapped.take(document)
        finally:
            for token in mapped.tokens:
                with suppress(ClearboxError):  # It is freed after a minute anyway.
                    self._ask("DELETE", f"/v1/capture/shm/{quote(token, safe='')}")

    def _events(
        self, path: str, body: Any, parse: Callable[[int, dict[str, Any]], T]
    ) -> Generator[T, None, None]:
        """Yield what `parse` makes of the status and each event of a stream."""
        with self._http.ask("POST", path, encoded(body)) as answer:
            raise_if_refused(answer)
            events = answer.events()
            while True:
                with understood(answer.status):
                    event = next(events, None)
                    if event is None:
                        return
                    parsed = parse(answer.status, event)
                yield parsed

    def _ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """The JSON of a response."""
        sent = None if body is None else encoded(body)
        with self._http.ask(method, path, sent, headers) as answer:
            raise_if_refused(answer)
            content = answer.read()
        with understood(answer.status):
            document: dict[str, Any] = document_in(content, answer.kind)
        return document


def raise_if_refused(answer: Answer) -> None:
    """Raise the error that a response reports.

    Raises:
        ClearboxError: the response is one.

    """
    if 200 <= answer.status < 300:
        return
    text = bytes(answer.read()).decode(errors="replace")
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        body = {"message": text}
    raise ClearboxError.of(answer.status, body)

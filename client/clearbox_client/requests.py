# SPDX-License-Identifier: Apache-2.0
"""Request bodies, and lines of streams."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from clearbox_client.errors import InputError

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
DONE = "[DONE]"

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


def body_of(model: str, prompt: Prompt | Messages, fields: Mapping[str, Any]) -> Any:
    """The path and the JSON body of a request.

    Args:
        model: the model's name on the server.
        prompt: a text or token ids for a completion, messages for a chat.
        fields: other fields of the OpenAI interface and of Clearbox, which may hold
            arrays; None is omitted.

    """
    chat = (
        not isinstance(prompt, str) and bool(prompt) and isinstance(prompt[0], Mapping)
    )
    given = {name: plain(value) for name, value in fields.items() if value is not None}
    body = {"model": model, "return_token_ids": True, **given}
    if given.get("capture"):
        # A request for rows waits until they are there.
        body.setdefault("capture_wait", True)
        if given.get("stream"):
            body.setdefault("capture_stream", True)
    body["messages" if chat else "prompt"] = (
        prompt if isinstance(prompt, str) else [*prompt]
    )
    return (CHAT if chat else COMPLETIONS), body


def plain(value: Any) -> Any:
    """Arrays, tensors and numbers of numpy in nested values as lists and numbers."""
    if isinstance(value, Mapping):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        if all(type(one) in (int, float) for one in value):
            return value  # The numbers of a vector.
        return [plain(one) for one in value]
    return value.tolist() if hasattr(value, "tolist") else value


def is_last(line: str) -> bool:
    """Whether a line is the last one of a whole stream."""
    return line.startswith("data:") and line.removeprefix("data:").strip() == DONE


def document_of(line: str) -> dict[str, Any] | None:
    """The JSON of a line of a stream; None if the line has none."""
    if not line.startswith("data:") or is_last(line):
        return None
    document: dict[str, Any] | None = json.loads(line.removeprefix("data:"))
    if document is None:
        raise ValueError("an event of a stream is null")
    return document


def address_of(url: str) -> str:
    """The server's address, also if it is given as OpenAI's client takes it."""
    return url.rstrip("/").removesuffix("/v1")


def encoded(body: Any) -> bytes:
    """A request's body.

    Raises:
        InputError: it has what JSON cannot have.

    """
    try:
        return json.dumps(body, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        message = f"a field cannot be sent as JSON: {error}; pass finite plain values"
        raise InputError(message, "fields", None) from error


def headers_of(api_key: str | None) -> dict[str, str]:
    """The HTTP headers of every request."""
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}

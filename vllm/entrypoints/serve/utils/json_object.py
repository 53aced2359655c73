# SPDX-License-Identifier: Apache-2.0
"""JSON objects, for routes that read their bodies themselves."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from fastapi import Request

from vllm.entrypoints.serve.utils.json_reader import BodyError
from vllm.entrypoints.serve.utils.request_body import parse_json, read_body

Fail: TypeAlias = Callable[[str, str, Any], Exception]
"""Makes the error (HTTP 400) of a message, a parameter and its value."""


async def read_object(
    request: Request, names: Sequence[str], fail: Fail, may_be_empty: bool = False
) -> dict[str, Any]:
    """The request's JSON object, which may have only the fields `names`.

    An empty body is an object without fields, if it `may_be_empty`.
    """
    raw = await read_body(request)
    try:
        body = {} if may_be_empty and not raw else await parse_json(raw)
    except (ValueError, RecursionError) as error:
        why = str(error) if isinstance(error, BodyError) else f"not JSON: {error}"
        raise fail(f"body: {why}", "body", bytes(raw[:40])) from None
    if not isinstance(body, dict):
        raise fail("body: must be a JSON object", "body", type(body).__name__)
    if unknown := sorted(body.keys() - set(names)):
        raise fail(
            f"{unknown[0]}: there is no such field; the fields are {list(names)}",
            unknown[0],
            body[unknown[0]],
        )
    return body


def flag(body: Mapping[str, Any], name: str, fail: Fail) -> bool:
    """A field that is true or false; false if it is missing or null."""
    value = body.get(name)
    if not isinstance(value, bool | None):
        raise fail(f"{name} must be true or false", name, value)
    return bool(value)

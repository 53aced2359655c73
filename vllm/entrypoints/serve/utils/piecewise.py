# SPDX-License-Identifier: Apache-2.0
"""Validates long parts of a request in pieces, before the request as a whole.

pydantic returns only when it has found every error, and holds the event loop meanwhile:
a list of 130,000 numbers where messages are expected takes seconds, as each is compared
with every kind of message. In pieces it ends with the first piece that is wrong.
"""

import asyncio
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import islice
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

LONG = 128
"""Parts with more items than this are validated in pieces."""
_PIECE, _PIECE_OF_SCALARS = 64, 4096
MAX_NAMES = 1024
"""Names in the object that is the body."""
MAX_PARTS = 4096
"""Parts of the contents of all messages together: upstream reads them repeatedly."""


async def check_in_pieces(model: type[BaseModel], body: Any) -> list[Any]:
    """Validate the long lists and objects in a body's fields.

    Other tasks run between two pieces.

    Args:
        model: the class of the request.
        body: parsed JSON.

    Returns:
        The errors of the first piece that has any, as `ValidationError.errors()`; their
        `loc` begins with the name of the field. Empty if all pieces are valid.

    """
    if not isinstance(body, dict):
        return []
    if len(body) > MAX_NAMES:
        return [_error((), f"has {len(body)} fields; at most {MAX_NAMES}", body)]
    if found := _check_contents(body.get("messages")):
        return found
    for name, field in model.model_fields.items():
        value = body.get(field.alias or name, body.get(name))
        if not isinstance(value, (list, dict)) or len(value) <= LONG:
            continue
        adapter = _adapter(model, name)
        for start, piece in _pieces(value) if adapter is not None else ():
            if errors := _errors_of(adapter, piece):
                return [_moved(one, name, start) for one in errors]
            await asyncio.sleep(0)
    return []


@cache
def _adapter(model: type[BaseModel], name: str) -> TypeAdapter[Any] | None:
    """Validates one field; None if its type cannot stand alone."""
    try:
        return TypeAdapter(model.model_fields[name].rebuild_annotation())
    except (PydanticSchemaGenerationError, PydanticUserError):
        return None


def _pieces(
    value: list[Any] | dict[str, Any],
) -> Iterator[tuple[int, list[Any] | dict[str, Any]]]:
    """Parts of a list or an object with the index at which each begins.

    The first one has an item of each type, as a union may forbid to mix them.
    """
    items = list(value.values()) if isinstance(value, dict) else value
    first = {type(item): item for item in reversed(items)}
    if isinstance(value, list):
        yield 0, list(first.values())
    is_plain = not first.keys() & {list, dict}
    size = _PIECE_OF_SCALARS if is_plain else _PIECE
    if isinstance(value, list):
        for start in range(0, len(value), size):
            yield start, value[start : start + size]
        return
    pairs = iter(value.items())
    while piece := dict(islice(pairs, size)):
        yield 0, piece


def _errors_of(adapter: TypeAdapter[Any] | None, piece: Any) -> Sequence[Any]:
    assert adapter is not None, "pieces are made only where an adapter exists"
    try:
        adapter.validate_python(piece)
    except ValidationError as error:
        return error.errors(include_url=False)
    except Exception:  # Raised by a type's own check; the whole request meets it too.
        return ()
    return ()


def _moved(error: Any, name: str, start: int) -> Any:
    """An error of a piece, with its place in the whole body."""
    place = [one + start if isinstance(one, int) else one for one in error["loc"][:2]]
    return {**error, "loc": (name, *place, *error["loc"][2:])}


def _check_contents(messages: Any) -> list[Any]:
    """Bound the number of messages' parts, and reject values that are not parts."""
    total = 0
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, list):
            continue
        total += len(content)
        where = ("messages", index, "content")
        if total > MAX_PARTS:
            return [_error(where, f"messages have more than {MAX_PARTS} parts", [])]
        wrong = next((one for one in content if not isinstance(one, (dict, str))), "")
        if len(content) > LONG and wrong != "":
            return [_error(where, "a part must be an object or a string", wrong)]
    return []


def _error(where: tuple[str | int, ...], message: str, value: Any) -> dict[str, Any]:
    return {"type": "value_error", "loc": where, "msg": message, "input": value}

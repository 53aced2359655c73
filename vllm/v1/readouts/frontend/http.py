# SPDX-License-Identifier: Apache-2.0
"""JSON form of readout results in HTTP responses.

Arrays are nested lists, with null for NaN and infinity. Rows are objects with `dtype`,
`shape` and `data`, the base64 of the little-endian bytes, like packed steering vectors.
Large arrays are encoded when the response is sent, piece by piece on a thread: the list
of a million numbers would keep the event loop for half a second.
"""

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from pydantic import BaseModel, model_serializer

from vllm.v1.readouts.results import Array, ReadoutResult
from vllm.v1.residual.choices import by_choice

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput, RequestOutput


PIECE_NUMBERS = 1 << 14
"""Numbers that are encoded at once; a few milliseconds. Larger arrays wait."""


class Listed(BaseModel):
    """A large array whose encoding is deferred until the response is sent.

    It is a nested list if the response model is dumped as a whole.
    """

    array: Any
    """The values, of any shape."""

    @model_serializer
    def plain(self) -> Any:
        """The nested list."""
        return msgspec.json.decode(b"".join(self.pieces()))

    def pieces(self) -> Iterator[bytes]:
        """The JSON text of the nested list, in pieces."""
        array: Array = self.array
        each = max(PIECE_NUMBERS * len(array) // array.size, 1)
        for start in range(0, len(array), each):
            text = msgspec.json.encode(array[start : start + each].tolist())
            yield (b"," if start else b"[") + text[1:-1]
        yield b"]"


def listed_in(readouts: Any) -> Iterator[Listed]:
    """The large arrays in the `readouts` field of a response."""
    if isinstance(readouts, Listed):
        yield readouts
    elif isinstance(readouts, dict):
        for value in readouts.values():
            yield from listed_in(value)


def told(readouts: Any, tell: Callable[[Listed], Any]) -> Any:
    """The `readouts` field with `tell(array)` in place of large arrays."""
    if isinstance(readouts, Listed):
        return tell(readouts)
    if isinstance(readouts, dict):
        return {name: told(value, tell) for name, value in readouts.items()}
    return readouts


def response_readouts(
    outputs: Sequence["RequestOutput | None"],
) -> dict[str, Any] | None:
    """The `readouts` field of a response to one or several prompts.

    With several choices, results are keyed by the choice's index as a string. None if
    there are no results.
    """
    found: dict[str, Any] | None = by_choice(
        outputs, lambda sample: as_json(sample.readouts or {})
    )
    return found


def stamp(chunk: Any, part: "CompletionOutput") -> None:
    """Set the `readouts` field of a streamed chunk; the last one has all results."""
    if part.readouts:
        chunk.readouts = as_json(part.readouts)


def as_json(results: Mapping[str, ReadoutResult]) -> dict[str, Any]:
    """JSON-serialisable results by name."""
    return {name: _result(one) for name, one in results.items()}


def _result(result: ReadoutResult) -> dict[str, Any]:
    found: dict[str, Any] = {
        "kind": result.kind,
        "positions": result.positions,
        "taps": [list(tap) for tap in result.taps],
    }
    for name, array in result.arrays.items():
        found[name] = packed(array) if name == "rows" else _listed(array)
    if result.error is not None:
        found["error"] = result.error
    if result.note is not None:
        found["note"] = result.note
    if result.num_prompt_tokens is not None:
        found["num_prompt_tokens"] = result.num_prompt_tokens
    return found


def packed(array: Array) -> dict[str, Any]:
    """An array as `{"dtype", "shape", "data"}`, in base64."""
    data = np.ascontiguousarray(array)
    little = data.astype(data.dtype.newbyteorder("<"), copy=False)
    return {
        "dtype": str(data.dtype),
        "shape": list(data.shape),
        "data": base64.b64encode(little.tobytes()).decode(),
    }


def _listed(array: Array) -> Any:
    listed = Listed.model_construct(array=array)
    if array.size > PIECE_NUMBERS:
        return listed
    return listed.plain() if array.size else array.tolist()

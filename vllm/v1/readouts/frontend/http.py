# SPDX-License-Identifier: Apache-2.0
"""JSON form of readout results in HTTP responses.

Arrays are nested lists, with null for NaN and infinity. Rows are objects with `dtype`,
`shape` and `data`, the base64 of the little-endian bytes, like packed steering vectors.
Results of many numbers, of all choices together, are encoded when the response is sent,
piece by piece on a thread: a million numbers would keep the event loop for 0.5 s.
"""

import base64
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from pydantic import BaseModel, model_serializer

from vllm.v1.readouts.results import ReadoutResult
from vllm.v1.residual.choices import by_choice
from vllm.v1.residual.readout_plan import Array

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput, RequestOutput


PIECE_NUMBERS = 1 << 14
"""Numbers that are encoded at once, in a few milliseconds. More of them wait."""
RESULT_NUMBERS = 32
"""A result takes as long as so many numbers, besides its own."""


class Listed(BaseModel):
    """Results whose encoding is deferred until the response is sent.

    They are plain data if the response model is dumped as a whole.
    """

    results: Any
    """The results by name, or these by choice."""

    @model_serializer
    def plain(self) -> Any:
        """Their JSON form."""
        return msgspec.json.decode(b"".join(self.pieces()))

    def pieces(self) -> Iterator[bytes]:
        """Their JSON text, in pieces."""
        return _pieces(self.results)


def response_readouts(
    outputs: Sequence["RequestOutput | None"],
) -> dict[str, Any] | None:
    """The `readouts` field of a response to one or several prompts.

    With several choices, results are keyed by the choice's index as a string. None if
    there are no results.
    """
    return _listed(by_choice(outputs, lambda sample: sample.readouts or {}))


def stamp(chunk: Any, part: "CompletionOutput") -> None:
    """Set the `readouts` field of a streamed chunk; the last one has all results."""
    if part.readouts:
        chunk.readouts = _listed(part.readouts)


def _listed(results: Any) -> Any:
    """Results as plain data; `Listed` if they have many numbers."""
    if results is None:
        return None
    listed = Listed.model_construct(results=results)
    return listed if _count(results) > PIECE_NUMBERS else listed.plain()


def _count(found: Any) -> int:
    """The numbers in results, by which the time to encode them is estimated."""
    if isinstance(found, ReadoutResult):
        arrays = sum(array.size for array in found.arrays.values())
        return arrays + len(found.positions) + RESULT_NUMBERS
    return sum(map(_count, found.values()))


def _pieces(found: Any) -> Iterator[bytes]:
    if isinstance(found, ReadoutResult):
        yield from _pieces_of(found)
        return
    yield b"{"
    for number, (name, one) in enumerate(found.items()):
        yield (b"," if number else b"") + msgspec.json.encode(name) + b":"
        yield from _pieces(one)
    yield b"}"


def _pieces_of(result: ReadoutResult) -> Iterator[bytes]:
    facts: dict[str, Any] = {
        "kind": result.kind,
        "positions": result.positions,
        "taps": [list(tap) for tap in result.taps],
    }
    for name in ("error", "note", "num_prompt_tokens"):
        if (value := getattr(result, name)) is not None:
            facts[name] = value
    yield msgspec.json.encode(facts)[:-1]
    for name, array in result.arrays.items():
        yield b"," + msgspec.json.encode(name) + b":"
        if name == "rows":
            yield msgspec.json.encode(packed(array))
            continue
        if not array.size:
            yield msgspec.json.encode(array.tolist())
            continue
        each = max(PIECE_NUMBERS * len(array) // array.size, 1)
        for start in range(0, len(array), each):
            text = msgspec.json.encode(array[start : start + each].tolist())
            yield (b"," if start else b"[") + text[1:-1]
        yield b"]"
    yield b"}"


def packed(array: Array) -> dict[str, Any]:
    """An array as `{"dtype", "shape", "data"}`, in base64."""
    data = np.ascontiguousarray(array)
    little = data.astype(data.dtype.newbyteorder("<"), copy=False)
    return {
        "dtype": str(data.dtype),
        "shape": list(data.shape),
        "data": base64.b64encode(little.tobytes()).decode(),
    }

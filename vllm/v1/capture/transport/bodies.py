# SPDX-License-Identifier: Apache-2.0
"""The forms of a response with rows: JSON and safetensors.

A response consists of a JSON document and the bytes of the rows. It is generated in
pieces, so that it needs no second copy of the rows and is sent as fast as the client
reads.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from secrets import token_hex
from typing import Any, NamedTuple, Protocol, TypeAlias

import msgspec
import pybase64

from vllm.v1.capture.errors import CaptureValidationError
from vllm.v1.capture.transport.parts import Part, Reference
from vllm.v1.residual.bounds import cut

PIECE_BYTES = 3 << 20
"""Maximum bytes of rows that are encoded at once, a multiple of 3 for base64."""
SMALL = 1 << 16
"""Smaller pieces are joined: each costs the server as much time as 100 kB."""
DTYPES = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float64": "F64",
    "int32": "I32",
    "int64": "I64",
}
"""Dtypes in the safetensors format; https://github.com/huggingface/safetensors."""

Piece: TypeAlias = bytes | memoryview
Tell: TypeAlias = Callable[[Reference], Mapping[str, Any]]
"""`tell(reference)`: the document, with `reference(part)` in place of rows and of large
readouts."""


class Array(Protocol):
    """A large list or object in the document."""

    def pieces(self) -> Iterator[bytes]:
        """Its JSON text, in pieces."""


class Body(NamedTuple):
    """The body of a response."""

    media_type: str
    size: int | None
    """Bytes of all pieces, for `Content-Length`; None if unknown in advance."""
    pieces: Iterator[Piece]
    """Of any size: what sends them cuts large ones."""
    is_ready: bool = False
    """Whether the pieces exist already, so that the next one takes no time."""


def json_text(document: Mapping[str, Any]) -> str:
    """A document as JSON, in the style of the server's other responses.

    Results hold the positions and token ids of every tap. `msgspec` encodes them
    several times as fast as `json`, which holds the interpreter meanwhile. They have no
    NaN, which it would encode as null.
    """
    rest = dict(document)
    results = rest.pop("capture_results", None)
    text = json.dumps(rest, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    if results is None:
        return text
    name = ',"capture_results":' if rest else '"capture_results":'
    return f"{text[:-1]}{name}{msgspec.json.encode(results).decode()}}}"


def as_json(tell: Tell, parts: Sequence[Part]) -> Body:
    """One JSON document, with rows as base64.

    The base64 and the text of large arrays are inserted piece by piece into the encoded
    document, so the JSON encoder need not process them.
    """
    mark = f"rows-{token_hex(16)}-"
    inserted: list[Part | Array] = []

    def refer(part: Part | Array) -> Any:
        inserted.append(part)
        if not isinstance(part, Part):
            return mark
        return {"data": mark}

    # The order of the text is that of the calls, but for `capture_results`, the last.
    texts = json_text(tell(refer)).split(mark)
    arrays = [one for one in inserted if not isinstance(one, Part)]
    order: list[Part | Array] = [
        *arrays,
        *(one for one in inserted if isinstance(one, Part)),
    ]
    for number in range(len(arrays)):  # A list has no quotes around it.
        texts[number] = texts[number][:-1]
        texts[number + 1] = texts[number + 1][1:]
    lengths = [len(text.encode()) for text in texts]
    lengths += [-(-one.rows.nbytes // 3) * 4 for one in order if isinstance(one, Part)]
    size = None if arrays else sum(lengths)
    return Body("application/json", size, coalesced(_spliced(texts, order)))


def _spliced(
    texts: Sequence[str], inserted: Sequence["Part | Array"]
) -> Iterator[Piece]:
    yield texts[0].encode()
    for one, after in zip(inserted, texts[1:], strict=True):
        if isinstance(one, Part):
            data = one.data
            for start in range(0, len(data), PIECE_BYTES):
                yield pybase64.b64encode(data[start : start + PIECE_BYTES])
        else:
            yield from one.pieces()
        yield after.encode()


def as_safetensors(tell: Tell, parts: Sequence[Part]) -> Body:
    """A safetensors file, with the document in its metadata under `response`."""
    entries: dict[str, Any] = {}
    offset = 0
    for part in parts:
        end = offset + part.rows.nbytes
        entries[part.name] = {
            "dtype": DTYPES[part.dtype],
            "shape": list(part.rows.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    mark = f"array-{token_hex(16)}"
    arrays: list[Part | Array] = []

    def refer(one: Part | Array) -> Any:
        if isinstance(one, Part):
            return {"part": one.name}
        arrays.append(one)
        return mark

    texts = json_text(tell(refer)).split(f'"{mark}"')
    head = json.dumps({"__metadata__": {"response": mark}, **entries})
    before, after = head.split(mark)
    # In pieces, between which other threads run.
    inner = (json.dumps(str(one, "utf-8"))[1:-1] for one in _spliced(texts, arrays))
    text = "".join([before, *inner, after]).encode()
    text += b" " * (-len(text) % 8)
    first = len(text).to_bytes(8, "little") + text
    pieces = coalesced(chain([first], (part.data for part in parts)))
    return Body("application/safetensors", len(first) + offset, pieces, is_ready=True)


def coalesced(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """The same bytes with small pieces joined, and none empty."""
    small: list[Piece] = []
    size = 0
    for piece in pieces:
        if len(piece) < SMALL:
            small.append(piece)
            size += len(piece)
            if size < SMALL:
                continue
            piece, small, size = b"".join(small), [], 0
        elif size:
            yield b"".join(small)
            small, size = [], 0
        yield piece
    if size:
        yield b"".join(small)


FORMS: dict[str, Callable[[Tell, Sequence[Part]], Body]] = {
    "application/json": as_json,
    "application/safetensors": as_safetensors,
}
"""The form of each media type."""

OTHER_FORMS = ("application/vnd.apache.arrow.stream", "multipart/mixed")
"""Media types that carry tensors too, and in which no response is sent."""


def form_for(accept: str) -> str:
    """The first of `FORMS` in an `Accept` header; JSON if it names none.

    Args:
        accept: the header's value; weights are ignored.

    Raises:
        CaptureValidationError: it names only other forms for tensors.

    """
    named = [one.partition(";")[0].strip().lower() for one in accept.split(",")]
    for kind in named:
        if kind in FORMS:
            return kind
    if all(kind in OTHER_FORMS for kind in named):
        raise CaptureValidationError(
            f"Accept: no response is sent as {cut(accept)!r}; use "
            "application/safetensors, which clients read without a copy, or "
            "application/json",
            parameter="Accept",
            value=cut(accept),
        )
    return "application/json"

# SPDX-License-Identifier: Apache-2.0
"""The formats of a response with rows: JSON, multipart, safetensors and Arrow.

A response consists of a JSON document and the bytes of the rows. It is generated in
pieces, so that it needs no second copy of the rows and is sent as fast as the client
reads.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from secrets import token_hex
from typing import Any, NamedTuple, TypeAlias

import msgspec
import pyarrow as pa
import pybase64

from vllm.v1.capture.transport.parts import Part, Reference

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

MULTIPART = "multipart/mixed"

Piece: TypeAlias = bytes | memoryview
Tell: TypeAlias = Callable[[Reference], Mapping[str, Any]]
"""`tell(reference)`: the document, with `reference(part)` in place of rows."""


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

    The base64 is inserted piece by piece into the encoded document; it needs no
    escapes, so the JSON encoder need not process it.
    """
    mark = f"rows-{token_hex(16)}-"
    number = {part.name: str(index) for index, part in enumerate(parts)}

    def refer(part: Part) -> dict[str, Any]:
        packed = {} if part.encoding is None else {"encoding": part.encoding}
        return {**packed, "data": f"{mark}{number[part.name]}-"}

    begin, *rest = json_text(tell(refer)).split(mark)
    size: int | None = len(begin.encode())
    for text in rest:
        index, _, after = text.partition("-")
        part = parts[int(index)]
        length = None if part.encoding else -(-part.rows.nbytes // 3) * 4
        if size is not None:
            size = None if length is None else size + length + len(after.encode())
    return Body("application/json", size, coalesced(_spliced(begin, rest, parts)))


def _spliced(begin: str, rest: Sequence[str], parts: Sequence[Part]) -> Iterator[Piece]:
    yield begin.encode()
    for text in rest:
        index, _, after = text.partition("-")
        data = encoded(parts[int(index)])
        for start in range(0, len(data), PIECE_BYTES):
            yield pybase64.b64encode(data[start : start + PIECE_BYTES])
        yield after.encode()


def encoded(part: Part) -> memoryview:
    """The bytes of a part, compressed if its request asks for it."""
    if part.encoding is None:
        return part.data
    assert part.encoding == "zstd", f"admission let {part.encoding!r} through"
    packed = pa.compress(pa.py_buffer(part.data), codec="zstd", asbytes=True)
    return memoryview(packed)


def as_multipart(tell: Tell, parts: Sequence[Part]) -> Body:
    """`multipart/mixed` (RFC 2046): the document, then one binary part per tensor.

    The document refers to each part by its `Content-ID`.
    """
    boundary = token_hex(16)
    first = document_part(boundary, tell)
    last = last_part(boundary)
    size = len(first) + len(last)
    for part in parts:
        size += len(head(boundary, part, part.rows.nbytes)) + part.rows.nbytes + 2
    known = not any(part.encoding for part in parts)
    media_type = f"{MULTIPART}; boundary={boundary}"
    pieces = coalesced(_multipart(boundary, first, parts, last))
    return Body(media_type, size if known else None, pieces, is_ready=known)


def _multipart(
    boundary: str, first: bytes, parts: Sequence[Part], last: bytes
) -> Iterator[Piece]:
    yield first
    for part in parts:
        yield from binary_part(boundary, part)
    yield last


def parts_of_event(boundary: str, tell: Tell, parts: Sequence[Part]) -> Iterator[Piece]:
    """The document and tensors of one event of a stream, as in `as_multipart`."""
    return coalesced(_multipart(boundary, document_part(boundary, tell), parts, b""))


def last_part(boundary: str) -> bytes:
    """The end of a multipart response."""
    return f"--{boundary}--\r\n".encode()


def document_part(boundary: str, tell: Tell) -> bytes:
    """The JSON part of a multipart response."""

    def refer(part: Part) -> dict[str, Any]:
        packed = {} if part.encoding is None else {"encoding": part.encoding}
        return {"part": part.name, **packed}

    return text_part(boundary, json_text(tell(refer)).encode())


def text_part(boundary: str, text: bytes) -> bytes:
    """A part with a JSON text."""
    return (
        f"--{boundary}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(text)}\r\n\r\n"
    ).encode() + b"%b\r\n" % text


def binary_part(boundary: str, part: Part) -> Iterator[Piece]:
    """One binary part of a multipart response."""
    data = encoded(part)
    yield head(boundary, part, len(data))
    yield data
    yield b"\r\n"


def head(boundary: str, part: Part, size: int) -> bytes:
    """The boundary and the headers of a binary part of `size` bytes."""
    shape = ",".join(map(str, part.rows.shape))
    return (
        f"--{boundary}\r\nContent-Type: application/octet-stream\r\n"
        f"Content-ID: <{part.name}>\r\nX-Dtype: {part.dtype}\r\nX-Shape: {shape}\r\n"
        f"Content-Length: {size}\r\n\r\n"
    ).encode()


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
    document = json_text(tell(lambda part: {"part": part.name}))
    text = json.dumps({"__metadata__": {"response": document}, **entries}).encode()
    text += b" " * (-len(text) % 8)
    first = len(text).to_bytes(8, "little") + text
    pieces = coalesced(chain([first], (part.data for part in parts)))
    return Body("application/safetensors", len(first) + offset, pieces, is_ready=True)


def as_arrow(tell: Tell, parts: Sequence[Part]) -> Body:
    """An Arrow IPC stream with one record batch per tensor.

    The document is in the schema's metadata under `response`. Values are `half_float`,
    `float` or `double`. Arrow has no bfloat16: its bits are `uint16`, and the metadata
    of the field holds the `dtype`.
    """
    document = json_text(tell(lambda part: {"part": part.name}))
    pieces = list(coalesced(_arrow(document, parts)))
    size = sum(map(len, pieces))
    kind = "application/vnd.apache.arrow.stream"
    return Body(kind, size, iter(pieces), is_ready=True)


def _arrow(document: str, parts: Sequence[Part]) -> list[Piece]:
    sink = _Pieces()
    width, kind = (parts[0].rows.shape[1], parts[0].dtype) if parts else (0, "float32")
    values = pa.list_(_arrow_type(kind), width)
    schema = pa.schema(
        [
            pa.field("part", pa.string()),
            pa.field("layer", pa.int32()),
            pa.field("hook", pa.string()),
            pa.field("position", pa.int64()),
            pa.field("token_id", pa.int64()),
            pa.field("values", values, metadata={"dtype": kind}),
        ],
        metadata={"response": document},
    )
    lists: dict[int, pa.Array] = {}
    with pa.ipc.new_stream(pa.PythonFile(sink, "w"), schema) as stream:
        for part in parts:
            stream.write_batch(_batch(part, schema, lists))
    return sink.written


def _batch(part: Part, schema: pa.Schema, lists: dict[int, pa.Array]) -> pa.RecordBatch:
    """The batch of a part; `lists` has columns by the ids of the lists they are of."""

    def column(values: list[Any]) -> pa.Array:
        # Parts share these lists.
        if id(values) not in lists:
            lists[id(values)] = pa.array(values, pa.int64())
        return lists[id(values)]

    count = len(part.rows)
    flat = pa.Array.from_buffers(
        schema.field("values").type.value_type,
        part.rows.numel(),
        [None, pa.py_buffer(part.data)],
    )
    columns = [
        pa.repeat(pa.scalar(part.name, pa.string()), count),
        pa.repeat(pa.scalar(part.layer, pa.int32()), count),
        pa.repeat(pa.scalar(part.hook, pa.string()), count),
        column(part.positions),
        column(part.token_ids),
        pa.FixedSizeListArray.from_arrays(flat, type=schema.field("values").type),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _arrow_type(dtype: str) -> pa.DataType:
    types = {
        "float32": pa.float32(),
        "float16": pa.float16(),
        "float64": pa.float64(),
        "bfloat16": pa.uint16(),
        "int32": pa.int32(),
        "int64": pa.int64(),
    }
    return types[dtype]


class _Pieces:
    """A file object that keeps what is written to it, without a copy."""

    closed = False

    def __init__(self) -> None:
        self.written: list[Piece] = []

    def write(self, data: Any) -> int:
        """Called by the Arrow writer with bytes or a `pyarrow.Buffer`."""
        self.written.append(memoryview(data))
        return len(data)

    def flush(self) -> None:
        """Do nothing: there is no buffer."""

    def close(self) -> None:
        """Called by the Arrow writer."""
        self.closed = True


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
    MULTIPART: as_multipart,
    "application/safetensors": as_safetensors,
    "application/vnd.apache.arrow.stream": as_arrow,
}
"""The format of each media type."""


def form_for(accept: str, parts: Sequence[Part] = ()) -> str:
    """The first supported media type in an `Accept` header; JSON if there is none.

    Args:
        accept: the header's value; weights are ignored.
        parts: the rows to send. Arrow is skipped if they differ in dtype or width, as
            all batches of a stream have the same schema.

    """
    for named in accept.split(","):
        kind = named.partition(";")[0].strip().lower()
        if kind in FORMS:
            schemas = {(part.dtype, tuple(part.rows.shape[1:])) for part in parts}
            if kind.endswith("arrow.stream") and len(schemas) > 1:
                continue
            return kind
    return "application/json"

# SPDX-License-Identifier: Apache-2.0
"""Conversion of captured rows to Arrow record batches and back."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch

VALUE_TYPES = {"float16": pa.float16(), "float32": pa.float32()}
"""The captured dtypes that Arrow supports."""


def schema_of(sidecar: dict[str, Any], widen: bool) -> pa.Schema:
    """The schema of a table, with facts about all rows as metadata.

    Arrow has no bfloat16. A row of it is stored as one binary value with its bits or,
    with `widen`, as a list of float32, which is exact and twice as large.

    Args:
        sidecar: of a key in the table.
        widen: whether bfloat16 is stored as float32.

    """
    dtype, width = sidecar["dtype"], sidecar["hidden_size"]
    if dtype in VALUE_TYPES or widen:
        element = VALUE_TYPES.get(dtype, pa.float32())
        values, stored = pa.list_(element, width), str(element)
    else:
        values = pa.binary(width * getattr(torch, dtype).itemsize)
        stored = "bits, little-endian"
    return pa.schema(
        [
            pa.field("request_id", pa.string(), nullable=False),
            pa.field("layer", pa.int32(), nullable=False),
            pa.field("hook", pa.string(), nullable=False),
            pa.field("position", pa.int32(), nullable=False),
            pa.field("token_id", pa.int32()),
            pa.field("values", values, nullable=False),
        ],
        metadata={
            "model": str(sidecar["model"]),
            "layer_convention": sidecar["layer_convention"],
            "hidden_size": str(width),
            "captured_dtype": dtype,
            "stored_dtype": stored,
            "widened": str(dtype not in VALUE_TYPES and widen).lower(),
        },
    )


class Span(NamedTuple):
    """Some consecutive rows of a key."""

    sidecar: dict[str, Any]
    """Of the key."""
    first: int
    """Index of the first row among the key's rows."""
    count: int


class IntColumns:
    """Converts lists of integers, each once: keys share those of their positions."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Any, pa.Array]] = {}

    def slice(self, values: list[int], span: Span) -> pa.Array:
        """The entries of a span, as int32."""
        found = self._made.get(id(values))
        if found is None:
            # With the list, so that no other one gets its id.
            found = self._made[id(values)] = values, pa.array(values, pa.int32())
        return found[1].slice(span.first, span.count)


def batch_of(
    request_id: str,
    spans: Sequence[Span],
    values: pa.Array,
    schema: pa.Schema,
    ints: IntColumns,
) -> pa.RecordBatch:
    """A record batch of rows of one request.

    Args:
        request_id: the request's name.
        spans: what the rows are, at least one.
        values: the rows of all spans, in order.
        schema: as returned by `schema_of`.
        ints: of the request.

    """
    layers = [span.sidecar["layer"] for span in spans]
    counts = [span.count for span in spans]
    hooks = [pa.scalar(span.sidecar["hook"], pa.string()) for span in spans]
    columns = [
        pa.repeat(pa.scalar(request_id, pa.string()), sum(counts)),
        pa.array(np.repeat(np.array(layers, np.int32), counts)),
        pa.concat_arrays(list(map(pa.repeat, hooks, counts))),
        pa.concat_arrays([ints.slice(s.sidecar["positions"], s) for s in spans]),
        pa.concat_arrays([ints.slice(s.sidecar["token_ids"], s) for s in spans]),
        values,
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def is_stored_as_captured(sidecar: dict[str, Any], kind: pa.DataType) -> bool:
    """Whether values of the type `kind` are the bytes of the captured rows."""
    if not pa.types.is_fixed_size_list(kind):
        return True
    return kind.value_type == VALUE_TYPES.get(sidecar["dtype"])


def values_of(rows: torch.Tensor, kind: pa.DataType) -> pa.Array:
    """Rows `[rows, hidden_size]` as values, without a copy if `kind` is their dtype."""
    if pa.types.is_fixed_size_list(kind):
        wanted = torch.float16 if kind.value_type == pa.float16() else torch.float32
        data = rows.to(wanted).contiguous().numpy()
    else:
        data = rows.contiguous().view(torch.int16).numpy()
    return values_in(pa.py_buffer(data), len(rows), kind)


def values_in(buffer: pa.Buffer, count: int, kind: pa.DataType) -> pa.Array:
    """The array of `count` values whose bytes are `buffer`."""
    if not pa.types.is_fixed_size_list(kind):
        return pa.Array.from_buffers(kind, count, [None, buffer])
    length = count * kind.list_size
    flat = pa.Array.from_buffers(kind.value_type, length, [None, buffer])
    return pa.Array.from_buffers(kind, count, [None], children=[flat])


def rows_of(table: pa.Table) -> torch.Tensor:
    """The values of a table as a tensor `[rows, hidden_size]` in the captured dtype.

    Args:
        table: a table that pyarrow read from the consumer's files; may be filtered.

    Raises:
        KeyError: the table's metadata lacks the dtype or the width.

    """
    facts = table.schema.metadata or {}
    dtype = getattr(torch, facts[b"captured_dtype"].decode())
    width = int(facts[b"hidden_size"])
    column = table.column("values").combine_chunks()
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    parts = [_rows(chunk, dtype, width) for chunk in chunks]
    return torch.cat(parts) if parts else torch.empty(0, width, dtype=dtype)


def _rows(values: pa.Array, dtype: torch.dtype, width: int) -> torch.Tensor:
    if not len(values):
        return torch.empty(0, width, dtype=dtype)
    if pa.types.is_fixed_size_binary(values.type):
        size = len(values) * width
        bits = np.frombuffer(values.buffers()[1], np.int16)
        first = values.offset * width
        return (
            torch.from_numpy(bits[first : first + size].copy())
            .view(dtype)
            .view(len(values), width)
        )
    flat = torch.from_numpy(values.flatten().to_numpy(zero_copy_only=False).copy())
    return flat.to(dtype).view(len(values), width)

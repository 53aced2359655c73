# SPDX-License-Identifier: Apache-2.0
"""Conversion of captured rows to Arrow record batches and back."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from vllm.v1.capture.consumers.arrow.readouts import Column, Values, described

VALUE_TYPES = {"float16": pa.float16(), "float32": pa.float32()}
"""The captured dtypes that Arrow supports."""


def schema_of(
    sidecar: dict[str, Any],
    widen: bool,
    columns: Sequence[Column] = (),
    has_rows: bool = True,
) -> pa.Schema:
    """The schema of a table, with facts about all rows as metadata.

    Arrow has no bfloat16. A row of it is stored as one binary value with its bits or,
    with `widen`, as a list of float32, which is exact and twice as large.

    Args:
        sidecar: of a key in the table, with captured rows if `has_rows`.
        widen: whether bfloat16 is stored as float32.
        columns: results of readouts, after the column `values`.
        has_rows: whether the table has captured rows, in the column `values`; with
            `columns` it may be null.

    """
    fields = [
        pa.field("request_id", pa.string(), nullable=False),
        pa.field("layer", pa.int32(), nullable=False),
        pa.field("hook", pa.string(), nullable=False),
        pa.field("position", pa.int32(), nullable=False),
        pa.field("token_id", pa.int32()),
    ]
    facts = {
        "model": str(sidecar["model"]),
        "layer_convention": sidecar["layer_convention"],
    }
    if has_rows:
        values, value_facts = _values_field(sidecar, widen, nullable=bool(columns))
        fields.append(values)
        facts |= value_facts
    if columns:
        fields += [pa.field(column.name, column.type) for column in columns]
        facts["readouts"] = described(columns)
    return pa.schema(fields, metadata=facts)


def _values_field(
    sidecar: dict[str, Any], widen: bool, nullable: bool
) -> tuple[pa.Field, dict[str, str]]:
    dtype, width = sidecar["dtype"], sidecar["hidden_size"]
    if dtype in VALUE_TYPES or widen:
        element = VALUE_TYPES.get(dtype, pa.float32())
        values, stored = pa.list_(element, width), str(element)
    else:
        values = pa.binary(width * getattr(torch, dtype).itemsize)
        stored = "bits, little-endian"
    return pa.field("values", values, nullable=nullable), {
        "hidden_size": str(width),
        **({"heads": json.dumps(sidecar["heads"])} if "heads" in sidecar else {}),
        "captured_dtype": dtype,
        "stored_dtype": stored,
        "widened": str(dtype not in VALUE_TYPES and widen).lower(),
    }


def batch_of(
    place: tuple[str, int, str],
    positions: Sequence[int],
    token_ids: Sequence[int | None],
    rows: torch.Tensor | None,
    schema: pa.Schema,
    columns: Sequence[Column] = (),
    values: Mapping[str, Values] | None = None,
) -> pa.RecordBatch:
    """Convert rows of a tap to a record batch, without a copy if the dtype is stored.

    Args:
        place: the request's name, the layer and the hook point.
        positions: of the table's rows.
        token_ids: one per position.
        rows: `[rows, hidden_size]`; None if none were captured at these positions.
        schema: as returned by `schema_of`.
        columns: the columns with results of readouts.
        values: of these columns.

    """
    count = len(positions)
    arrays = [
        *(
            pa.repeat(pa.scalar(value, schema.field(number).type), count)
            for number, value in enumerate(place)
        ),
        pa.array(positions, pa.int32()),
        pa.array(token_ids, pa.int32()),
    ]
    if "values" in schema.names:
        kind = schema.field("values").type
        arrays.append(pa.nulls(count, kind) if rows is None else _values(rows, kind))
    found = values or {}
    arrays += [one.array(found.get(one.name), positions) for one in columns]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _values(rows: torch.Tensor, kind: pa.DataType) -> pa.Array:
    if pa.types.is_fixed_size_list(kind):
        wanted = torch.float16 if kind.value_type == pa.float16() else torch.float32
        data = rows.to(wanted).contiguous().numpy()
    else:
        data = rows.contiguous().view(torch.int16).numpy()
    count, buffer = len(rows), pa.py_buffer(data)
    if not pa.types.is_fixed_size_list(kind):
        return pa.Array.from_buffers(kind, count, [None, buffer])
    length = count * kind.list_size
    flat = pa.Array.from_buffers(kind.value_type, length, [None, buffer])
    return pa.Array.from_buffers(kind, count, [None], children=[flat])


def rows_of(table: pa.Table) -> torch.Tensor:
    """The values of a table as a tensor `[rows, hidden_size]` in the captured dtype.

    Table rows with results of readouts alone are left out.

    Args:
        table: a table that pyarrow read from the consumer's files; may be filtered.

    Raises:
        KeyError: the table's metadata lacks the dtype or the width.

    """
    facts = table.schema.metadata or {}
    dtype = getattr(torch, facts[b"captured_dtype"].decode())
    width = int(facts[b"hidden_size"])
    column = table.column("values").drop_null().combine_chunks()
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


def in_batches(blocks: Iterable[torch.Tensor], size: int) -> Iterator[torch.Tensor]:
    """Regroup rows into blocks of about `size` bytes."""
    parts: list[torch.Tensor] = []
    held = 0
    for block in blocks:
        at_once = max(size // max(block[:1].nbytes, 1), 1)
        for first in range(0, len(block), at_once):
            part = block[first : first + at_once]
            if parts and held + part.nbytes > size:
                yield torch.cat(parts) if len(parts) > 1 else parts[0]
                parts, held = [], 0
            parts.append(part)
            held += part.nbytes
    if parts:
        yield torch.cat(parts) if len(parts) > 1 else parts[0]

# SPDX-License-Identifier: Apache-2.0
"""Conversion of captured rows to Arrow record batches and back."""

from typing import Any

import numpy as np
import pyarrow as pa
import torch

from vllm.v1.capture.types import CaptureFinalize

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


def batch_of(
    request_id: str,
    finalize: CaptureFinalize,
    first_row: int,
    rows: torch.Tensor,
    schema: pa.Schema,
) -> pa.RecordBatch:
    """Convert rows of a key to a record batch, without a copy if the dtype is stored.

    Args:
        request_id: the request's name.
        finalize: the key with its sidecar.
        first_row: index of the first of `rows` among the key's rows.
        rows: `[rows, hidden_size]`.
        schema: as returned by `schema_of`.

    """
    sidecar, count = finalize.sidecar, len(rows)
    part = slice(first_row, first_row + count)
    columns = [
        pa.repeat(pa.scalar(request_id, pa.string()), count),
        pa.repeat(pa.scalar(sidecar["layer"], pa.int32()), count),
        pa.repeat(pa.scalar(sidecar["hook"], pa.string()), count),
        pa.array(sidecar["positions"][part], pa.int32()),
        pa.array(sidecar["token_ids"][part], pa.int32()),
        _values(rows, schema.field("values").type),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _values(rows: torch.Tensor, kind: pa.DataType) -> pa.Array:
    if not pa.types.is_fixed_size_list(kind):
        bits = rows.contiguous().view(torch.int16).numpy()
        return pa.Array.from_buffers(kind, len(rows), [None, pa.py_buffer(bits)])
    wanted = torch.float16 if kind.value_type == pa.float16() else torch.float32
    values = rows.to(wanted).contiguous().numpy().reshape(-1)
    flat = pa.Array.from_buffers(
        kind.value_type, len(values), [None, pa.py_buffer(values)]
    )
    return pa.Array.from_buffers(kind, len(rows), [None], children=[flat])


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

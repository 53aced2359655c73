# SPDX-License-Identifier: Apache-2.0
"""Captured rows as Arrow record batches."""

from typing import Any

import numpy as np
import pyarrow as pa
import torch

from vllm.v1.capture.types import CaptureFinalize

VALUE_TYPES = {"float16": pa.float16(), "float32": pa.float32()}
"""Dtypes that Arrow has; the others are widened to float32, which is exact for
bfloat16."""


def schema_of(sidecar: dict[str, Any]) -> pa.Schema:
    """The columns, and what holds for all rows as metadata."""
    dtype, width = sidecar["dtype"], sidecar["hidden_size"]
    stored = VALUE_TYPES.get(dtype, pa.float32())
    return pa.schema(
        [
            pa.field("request_id", pa.string(), nullable=False),
            pa.field("layer", pa.int32(), nullable=False),
            pa.field("hook", pa.string(), nullable=False),
            pa.field("position", pa.int32(), nullable=False),
            pa.field("token_id", pa.int32()),
            pa.field("values", pa.list_(stored, width), nullable=False),
        ],
        metadata={
            "model": str(sidecar["model"]),
            "layer_convention": sidecar["layer_convention"],
            "hidden_size": str(width),
            "captured_dtype": dtype,
            "stored_dtype": str(stored),
            "widened": str(dtype not in VALUE_TYPES).lower(),
        },
    )


def batch_of(
    request_id: str,
    finalize: CaptureFinalize,
    first_row: int,
    rows: torch.Tensor,
    schema: pa.Schema,
) -> pa.RecordBatch:
    """Rows `first_row` and on of one key."""
    sidecar, count = finalize.sidecar, len(rows)
    part = slice(first_row, first_row + count)
    values = rows if rows.dtype is torch.float16 else rows.to(torch.float32)
    flat = pa.array(np.ascontiguousarray(values.numpy()).reshape(-1))
    columns = [
        pa.array([request_id] * count, pa.string()),
        pa.array(np.full(count, sidecar["layer"], np.int32)),
        pa.array([sidecar["hook"]] * count, pa.string()),
        pa.array(sidecar["positions"][part], pa.int32()),
        pa.array(sidecar["token_ids"][part], pa.int32()),
        pa.FixedSizeListArray.from_arrays(flat, sidecar["hidden_size"]),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)

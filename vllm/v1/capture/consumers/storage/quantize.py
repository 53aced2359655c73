# SPDX-License-Identifier: Apache-2.0
"""8-bit quantization: the records of the codecs `full8` and `topk8`.

The NumPy implementation defines the bytes. `csrc/codecs` produces the same ones faster
and without the GIL.
"""

from typing import Any

import numpy as np
import torch

from vllm.v1.capture.delivery.row_bytes import raw_bytes
from vllm.v1.residual.native import DTYPES, Bytes, library

Array = np.ndarray[Any, Any]


def encode_full8(rows: torch.Tensor) -> bytes:
    """Encode rows `[rows, width]` as records `[float32 scale][int8 * width]`.

    Integers and scales are little-endian. The scale is the largest magnitude of the row
    divided by 127, or NaN if the row has NaN or infinity.
    """
    native = library()
    if native is None or rows.dtype not in DTYPES or not rows.numel():
        return full8_reference(rows)
    num_rows, width = rows.shape
    return native.encode_full8(raw_bytes(rows), DTYPES[rows.dtype], num_rows, width)


def encode_topk8(rows: torch.Tensor, k: int) -> bytes:
    """Encode rows as records `[float32 scale][uint32 index * k][int8 * k]`.

    The `k` values of largest magnitude are kept, with indices in ascending order;
    `k` is at most the width.
    """
    native = library()
    if native is None or rows.dtype not in DTYPES or not rows.numel():
        return topk8_reference(rows, k)
    num_rows, width = rows.shape
    return native.encode_topk8(raw_bytes(rows), DTYPES[rows.dtype], num_rows, width, k)


def full8_reference(rows: torch.Tensor) -> bytes:
    """`encode_full8` in NumPy."""
    values = _float32(rows)
    record = np.empty(len(values), dtype=full8_record(values.shape[1]))
    record["scale"], record["q"] = _quantize(values)
    return record.tobytes()


def decode_full8(
    data: Bytes, num_rows: int, width: int, dtype: torch.dtype
) -> torch.Tensor:
    """Decode full8 records to rows `[num_rows, width]` of `dtype`."""
    record = np.frombuffer(data, dtype=full8_record(width), count=num_rows)
    return torch.from_numpy(dequantize(record["scale"], record["q"])).to(dtype)


def topk8_reference(rows: torch.Tensor, k: int) -> bytes:
    """`encode_topk8` in NumPy."""
    values = _float32(rows)
    record = np.empty(len(values), dtype=topk8_record(k))
    record["index"] = kept = _largest(values, k)
    record["scale"], record["q"] = _quantize(np.take_along_axis(values, kept, axis=1))
    return record.tobytes()


def full8_record(width: int) -> list[tuple[Any, ...]]:
    """The NumPy dtype of a full8 record."""
    return [("scale", "<f4"), ("q", "i1", (width,))]


def topk8_record(k: int) -> list[tuple[Any, ...]]:
    """The NumPy dtype of a topk8 record."""
    return [("scale", "<f4"), ("index", "<u4", (k,)), ("q", "i1", (k,))]


def dequantize(scale: Array, integers: Array) -> Array:
    """Scales `[rows]` times integers `[rows, width]`, in float32."""
    values: Array = scale[:, None] * integers.astype(np.float32)
    return values


def _float32(rows: torch.Tensor) -> Array:
    values: Array = rows.to(torch.float32).numpy()
    return values


def _largest(values: Array, k: int) -> Array:
    """Indices of the `k` largest magnitudes per row, ascending; ties: the first ones.

    NaN counts as infinity.
    """
    magnitude = np.abs(values)
    magnitude[np.isnan(magnitude)] = np.inf
    width = values.shape[1]
    limit = np.partition(magnitude, width - k, axis=1)[:, width - k, None]
    above, equal = magnitude > limit, magnitude == limit
    room = k - above.sum(axis=1, keepdims=True)
    kept = above | (equal & (np.cumsum(equal, axis=1) <= room))
    return np.nonzero(kept)[1].reshape(len(values), k)


def _quantize(values: Array) -> tuple[Array, Array]:
    """Scales `[rows]` and integers `[rows, width]` from -127 to 127."""
    largest = np.abs(values).max(axis=1, initial=0.0)
    scale = (largest / np.float32(127)).astype(np.float32)
    # Divided in float64: a scale may be subnormal.
    unit = np.where((scale > 0) & np.isfinite(scale), scale, 1).astype(np.float64)
    whole = np.rint(values / unit[:, None])
    integers = np.clip(np.nan_to_num(whole, nan=0.0), -127, 127).astype(np.int8)
    return np.where(np.isfinite(largest), scale, np.float32(np.nan)), integers

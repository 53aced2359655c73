# SPDX-License-Identifier: Apache-2.0
"""Eight bits per value: the records of `full8` and `topk8`, in numpy or compiled.

The numpy forms define the bytes. `csrc/codecs` gives the same ones, faster and
without the GIL.
"""

from typing import Any

import numpy as np
import torch

from vllm.v1.capture.delivery.row_bytes import raw_bytes
from vllm.v1.capture.native import DTYPES, Bytes, library

Array = np.ndarray[Any, Any]


def encode_full8(rows: torch.Tensor) -> bytes:
    """Records `[float32 scale][int8 * width]` of rows `[rows, width]`."""
    native = library()
    if native is None or rows.dtype not in DTYPES or not rows.numel():
        return full8_reference(rows)
    num_rows, width = rows.shape
    return native.encode_full8(raw_bytes(rows), DTYPES[rows.dtype], num_rows, width)


def encode_topk8(rows: torch.Tensor, k: int) -> bytes:
    """Records `[float32 scale][uint32 index * k][int8 * k]`; `k` up to the width."""
    native = library()
    if native is None or rows.dtype not in DTYPES or not rows.numel():
        return topk8_reference(rows, k)
    num_rows, width = rows.shape
    return native.encode_topk8(raw_bytes(rows), DTYPES[rows.dtype], num_rows, width, k)


def full8_reference(rows: torch.Tensor) -> bytes:
    """`encode_full8` in numpy."""
    values = _float32(rows)
    record = np.empty(len(values), dtype=full8_record(values.shape[1]))
    record["scale"], record["q"] = _quantize(values)
    return record.tobytes()


def decode_full8(
    data: Bytes, num_rows: int, width: int, dtype: torch.dtype
) -> torch.Tensor:
    """Scale times integer, `[num_rows, width]`."""
    record = np.frombuffer(data, dtype=full8_record(width), count=num_rows)
    return torch.from_numpy(dequantize(record["scale"], record["q"])).to(dtype)


def topk8_reference(rows: torch.Tensor, k: int) -> bytes:
    """`encode_topk8` in numpy."""
    values = _float32(rows)
    record = np.empty(len(values), dtype=topk8_record(k))
    record["index"] = kept = _largest(values, k)
    record["scale"], record["q"] = _quantize(np.take_along_axis(values, kept, axis=1))
    return record.tobytes()


def full8_record(width: int) -> list[tuple[Any, ...]]:
    """The fields of a record, as numpy takes them."""
    return [("scale", "<f4"), ("q", "i1", (width,))]


def topk8_record(k: int) -> list[tuple[Any, ...]]:
    """The fields of a record, as numpy takes them."""
    return [("scale", "<f4"), ("index", "<u4", (k,)), ("q", "i1", (k,))]


def dequantize(scale: Array, integers: Array) -> Array:
    """Scales `[rows]` times integers `[rows, width]`, in float32."""
    values: Array = scale[:, None] * integers.astype(np.float32)
    return values


def _float32(rows: torch.Tensor) -> Array:
    values: Array = rows.to(torch.float32).numpy()
    return values


def _largest(values: Array, k: int) -> Array:
    """Where the `k` largest magnitudes are, ascending; of equal ones the first."""
    magnitude = np.abs(values)
    magnitude[np.isnan(magnitude)] = np.inf
    width = values.shape[1]
    limit = np.partition(magnitude, width - k, axis=1)[:, width - k, None]
    above, equal = magnitude > limit, magnitude == limit
    room = k - above.sum(axis=1, keepdims=True)
    kept = above | (equal & (np.cumsum(equal, axis=1) <= room))
    return np.nonzero(kept)[1].reshape(len(values), k)


def _quantize(values: Array) -> tuple[Array, Array]:
    """Scale per row `[rows]` and integers `[rows, width]` within -127 to 127."""
    largest = np.abs(values).max(axis=1, initial=0.0)
    scale = (largest / np.float32(127)).astype(np.float32)
    # Divided in float64: a scale may be subnormal.
    unit = np.where((scale > 0) & np.isfinite(scale), scale, 1).astype(np.float64)
    whole = np.rint(values / unit[:, None])
    integers = np.clip(np.nan_to_num(whole, nan=0.0), -127, 127).astype(np.int8)
    return np.where(np.isfinite(largest), scale, np.float32(np.nan)), integers

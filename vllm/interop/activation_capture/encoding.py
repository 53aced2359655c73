# SPDX-License-Identifier: Apache-2.0
"""The row encodings of vllm-activation-capture: coordinates of 8 bits.

`rp8`    q [n, K] uint8, coordinates in a random subspace of K dimensions
`full8`  q [n, H] uint8
`topk8`  indices [n, K], values [n, K] uint8: the K largest magnitudes of each row

A value is `(q - zero) * scale` in float32. Scale and zero are `[1, K]` with one scale
per dimension and `[n, 1]` with one per row; for `topk8` they are always per row.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """The encoding of rows, with its parameters."""

    mode: str
    rp_k: int = 256
    rp_seed: int = 12345
    topk_k: int = 64
    per_dim_scale: bool = True

    @property
    def is_per_dim(self) -> bool:
        """Whether a scale is for a dimension, otherwise for a row."""
        return self.per_dim_scale and self.mode != "topk8"

    def count(self, hidden_size: int) -> int:
        """K, the number of values that are kept of a row."""
        kept = {"rp8": self.rp_k, "topk8": self.topk_k}.get(self.mode, hidden_size)
        return min(kept, hidden_size)

    def encode(self, rows: torch.Tensor) -> dict[str, Array]:
        """Encode rows `[n, H]` of any float dtype to arrays."""
        values: Array = rows.to(torch.float32).numpy()
        width = values.shape[1]
        if self.mode == "topk8":
            return _topk(values, self.count(width))
        if self.mode == "rp8":
            values = values @ orthonormal_basis(width, self.count(width), self.rp_seed)
        q, scale, zero = quantize(values, axis=0 if self.is_per_dim else 1)
        return {"q": q, "scale": scale, "zero": zero}

    def describe(self) -> dict[str, Any]:
        """The entry `compression` of the manifest."""
        return {
            "rp_k": self.rp_k if self.mode == "rp8" else None,
            "rp_seed": self.rp_seed if self.mode == "rp8" else None,
            "topk_k": self.topk_k if self.mode == "topk8" else None,
            "quant_bits": 8,
            "per_dim_scale": self.is_per_dim,
        }


@lru_cache(maxsize=8)
def orthonormal_basis(width: int, k: int, seed: int) -> Array:
    """A random `[width, k]` float32 matrix with orthonormal columns.

    It is determined by the arguments: the QR factorization of Gaussian values.
    """
    generator = np.random.Generator(np.random.PCG64(seed))
    gaussian = generator.standard_normal((width, k))
    basis, upper = np.linalg.qr(gaussian)
    # The signs of the columns are not unique in a QR factorization, so fix them.
    signed: Array = (basis * np.sign(np.diag(upper))).astype(np.float32)
    return signed


def quantize(values: Array, axis: int) -> tuple[Array, Array, Array]:
    """Quantize to `(q, scale, zero)` with one scale for all values along `axis`.

    A row or dimension that is not finite becomes NaN through its scale.
    """
    if not values.size:
        shape = [1 if n == axis else size for n, size in enumerate(values.shape)]
        return values.astype(np.uint8), np.ones(shape, "f4"), np.zeros(shape, "f4")
    low = values.min(axis=axis, keepdims=True).astype(np.float64)
    high = values.max(axis=axis, keepdims=True).astype(np.float64)
    scale = (high - low) / 255
    # All values are equal: the value is (0 - zero) * scale.
    scale = np.where(scale > 0, scale, np.maximum(np.abs(low), 1.0))
    scale = scale.astype(np.float32)
    finite = np.isfinite(low) & np.isfinite(high)
    with np.errstate(invalid="ignore", over="ignore"):
        zero = (-low / scale).astype(np.float32)
        # In place and in float32: most of an encoding's time is spent here.
        steps = values - low.astype(np.float32)
        steps /= scale
    np.rint(steps, out=steps)
    np.clip(steps, 0, 255, out=steps)
    if not (finite.all() and scale.all()):
        np.nan_to_num(steps, copy=False, nan=0.0)
    q = steps.astype(np.uint8)
    return q, np.where(finite, scale, np.float32(np.nan)), zero


def dequantize(arrays: dict[str, Array]) -> Array:
    """Decode coordinates `[n, K]`, float32; for `topk8` the retained values."""
    q = arrays["q"] if "q" in arrays else arrays["values"]
    restored: Array = (q.astype(np.float32) - arrays["zero"]) * arrays["scale"]
    return restored


def restore(arrays: dict[str, Array], hidden_size: int, rp_seed: int) -> Array:
    """Decode rows `[n, hidden_size]` in the model's space, as far as retained."""
    values = dequantize(arrays)
    if "indices" in arrays:
        rows = np.zeros((len(values), hidden_size), np.float32)
        np.put_along_axis(rows, arrays["indices"].astype(np.int64), values, axis=1)
        return rows
    if values.shape[1] == hidden_size:
        return values
    projected: Array = (
        values @ orthonormal_basis(hidden_size, values.shape[1], rp_seed).T
    )
    return projected


def _topk(values: Array, k: int) -> dict[str, Array]:
    width = values.shape[1]
    kept = np.argpartition(np.abs(values), width - k, axis=1)[:, width - k :]
    kept.sort(axis=1)
    q, scale, zero = quantize(np.take_along_axis(values, kept, axis=1), axis=1)
    indices = kept.astype(index_dtype(width))
    return {"indices": indices, "values": q, "scale": scale, "zero": zero}


def index_dtype(hidden_size: int) -> np.dtype[Any]:
    """The dtype of the indices of `topk8`."""
    return np.dtype(np.int16 if hidden_size <= 1 << 15 else np.int32)

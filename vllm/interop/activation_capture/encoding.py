# SPDX-License-Identifier: Apache-2.0
"""The row encodings of vllm-activation-capture: coordinates of 8 bits.

`rp8`    q [n, K] uint8, coordinates in a random subspace of K dimensions
`full8`  q [n, H] uint8
`topk8`  indices [n, K], values [n, K] uint8: the K largest magnitudes of each row

A value is `(q - zero) * scale` in float32. Scale and zero are `[1, K]` with one scale
per dimension and `[n, 1]` with one per row; for `topk8` they are always per row.
"""

from collections.abc import Sequence
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
        """Encode rows `[n, H]` on the host, of any float dtype, to arrays."""
        basis = None
        if self.mode == "rp8":
            width = rows.shape[1]
            columns = orthonormal_basis(width, self.count(width), self.rp_seed)
            basis = torch.from_numpy(columns)
        values, indices = self.coordinates(rows, basis)
        return self.named(quantize(values, 0 if self.is_per_dim else 1), indices)

    def coordinates(
        self, rows: torch.Tensor, basis: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What is kept of rows: values `[n, K]` float32, and of `topk8` their indices.

        Args:
            rows: `[n, H]`, on any device.
            basis: `[H, K]` float32 on the same device, for `rp8`.

        """
        values = rows.float()
        if basis is not None:
            return values @ basis, None
        if self.mode != "topk8":
            return values, None
        width = rows.shape[1]
        largest = values.abs().topk(self.count(width), dim=1, sorted=False).indices
        kept = largest.sort(dim=1).values
        return values.gather(1, kept), kept.to(index_dtype(width))

    def named(
        self, quantized: Sequence[torch.Tensor], indices: torch.Tensor | None = None
    ) -> dict[str, Array]:
        """The arrays of a file, made of q, scale and zero."""
        q, scale, zero = (part.numpy() for part in quantized)
        if indices is None:
            return {"q": q, "scale": scale, "zero": zero}
        return {"indices": indices.numpy(), "values": q, "scale": scale, "zero": zero}

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


def quantize(
    values: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize with one scale for all values along `dim`.

    A row or dimension that is not finite becomes NaN through its scale.

    Args:
        values: `[n, K]` float32, on any device.
        dim: the dimension.

    Returns:
        q `[n, K]` uint8; scale and zero, float32.

    """
    if not values.numel():
        shape = [1 if n == dim else size for n, size in enumerate(values.shape)]
        ones = torch.ones(shape, device=values.device)
        return values.to(torch.uint8), ones, torch.zeros_like(ones)
    low, high = (one.double() for one in values.aminmax(dim=dim, keepdim=True))
    scale = (high - low) / 255
    # All values are equal: the value is (0 - zero) * scale.
    scale = torch.where(scale > 0, scale, low.abs().clamp(min=1.0)).float()
    zero = (-low / scale.double()).float()
    steps = ((values - low.float()) / scale).round_().clamp_(0, 255)
    q = steps.nan_to_num_(nan=0.0).to(torch.uint8)
    finite = low.isfinite() & high.isfinite()
    return q, scale.masked_fill(~finite, float("nan")), zero


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


def index_dtype(hidden_size: int) -> torch.dtype:
    """The dtype of the indices of `topk8`."""
    return torch.int16 if hidden_size <= 1 << 15 else torch.int32

# SPDX-License-Identifier: Apache-2.0
"""The part of the encodings that is computed on the device, row by row.

Only its result is copied to the host:

`rp8`    the coordinates of a row, float32 [K], with one scale per dimension
others   a record of bytes: q or values [K], scale and zero (float32), and of `topk8`
         also the indices

A scale per dimension is known only at the end of the sequence. Coordinates are
therefore quantized on the host, where `full8` with such scales needs the whole rows.
"""

from dataclasses import dataclass

import torch

from vllm.interop.activation_capture.encoding import (
    Array,
    Encoding,
    index_dtype,
    orthonormal_basis,
    quantize,
)

_SCALES = 2 * torch.float32.itemsize
"""Bytes of the scale and the zero of a row."""


@dataclass(frozen=True, slots=True)
class DeviceEncoder:
    """Encodes rows on the device; a `RowEncoder`."""

    encoding: Encoding
    count: int
    """K, the number of values that are kept of a row."""
    width: int
    """Values per encoded row."""
    dtype: torch.dtype
    """float32 for coordinates, uint8 for records."""
    indices: torch.dtype
    """The dtype of the indices of `topk8`."""
    basis: torch.Tensor | None
    """`[hidden_size, K]` float32 on the device, of `rp8`."""

    @classmethod
    def of(
        cls,
        encoding: Encoding,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "DeviceEncoder | None":
        """The encoder for rows `[n, hidden_size]` of `dtype`.

        None if they must be copied whole, or would not become smaller.
        """
        count = encoding.count(hidden_size)
        indices = index_dtype(hidden_size)
        if encoding.is_per_dim:
            if encoding.mode != "rp8":
                return None
            width, kind = count, torch.float32
        else:
            each = 1 + (indices.itemsize if encoding.mode == "topk8" else 0)
            width, kind = count * each + _SCALES, torch.uint8
        if width * kind.itemsize >= hidden_size * dtype.itemsize:
            return None
        basis = None
        if encoding.mode == "rp8":
            columns = orthonormal_basis(hidden_size, count, encoding.rp_seed)
            basis = torch.from_numpy(columns).to(device)
        return cls(encoding, count, width, kind, indices, basis)

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Encode rows `[n, hidden_size]` to `[n, width]`, on the same device."""
        values, kept = self.encoding.coordinates(rows, self.basis)
        if self.dtype is torch.float32:
            return values
        parts = [part.view(torch.uint8) for part in quantize(values, dim=1)]
        if kept is not None:
            parts.append(kept.view(torch.uint8))
        return torch.cat(parts, dim=1)

    @property
    def no_rows(self) -> torch.Tensor:
        """Encoded rows `[0, width]` on the host."""
        return torch.empty(0, self.width, dtype=self.dtype)

    def arrays(self, encoded: torch.Tensor) -> dict[str, Array]:
        """The result of `Encoding.encode`, from encoded rows `[n, width]`."""
        if self.dtype is torch.float32:
            return self.encoding.named(quantize(encoded, dim=0))
        ends = (self.count, self.count + 4, self.count + _SCALES)
        # Copies, as the bytes of a number must be aligned.
        q, scale, zero, kept = (
            part.clone(memory_format=torch.contiguous_format)
            for part in encoded.tensor_split(ends, dim=1)
        )
        numbers = q, scale.view(torch.float32), zero.view(torch.float32)
        indices = kept.view(self.indices) if self.encoding.mode == "topk8" else None
        return self.encoding.named(numbers, indices)

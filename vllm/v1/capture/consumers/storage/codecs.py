# SPDX-License-Identifier: Apache-2.0
"""How rows become bytes: as they are, compressed, or with a stated error.

All codecs work row by row or on blocks of rows, so a reader can go to a position
without decoding what lies before it. `describe()` is what a sidecar holds;
`codec_of(description)` gives the codec that reads it.
"""

from abc import ABC, abstractmethod
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import torch

from vllm.v1.capture.consumers.storage.quantize import (
    decode_full8,
    dequantize,
    encode_full8,
    encode_topk8,
    topk8_record,
)
from vllm.v1.capture.delivery.row_bytes import raw_bytes
from vllm.v1.capture.errors import CaptureValidationError
from vllm.v1.capture.native import Bytes

CODECS = ("raw", "zstd", "full8", "rp8", "topk8")


class Codec(ABC):
    """Encodes rows `[rows, width]` of any float dtype."""

    name: ClassVar[str]
    error: ClassVar[str]
    """How far `reconstruct` may be from the rows, as a sentence."""

    @abstractmethod
    def encode(self, rows: torch.Tensor) -> Bytes:
        """The bytes of a block of rows."""

    @abstractmethod
    def reconstruct(
        self, data: Bytes, num_rows: int, width: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Rows `[num_rows, width]` from the bytes that `encode` made of them."""

    def row_bytes(self, width: int, dtype: torch.dtype) -> int | None:
        """Bytes of each row; None where blocks of rows are encoded together."""
        return None

    def describe(self) -> dict[str, Any]:
        """What a reader must know."""
        return {"name": self.name}


class Raw(Codec):
    """The rows' own bytes."""

    name = "raw"
    error = "none: bit for bit"

    def encode(self, rows: torch.Tensor) -> Bytes:
        """The bytes, not copied."""
        return raw_bytes(rows)

    def reconstruct(
        self, data: Bytes, num_rows: int, width: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """The rows, in the memory of `data` where that can be written to."""
        if not num_rows:
            return torch.empty(0, width, dtype=dtype)
        view = memoryview(data)
        own = bytearray(view) if view.readonly else view
        return torch.frombuffer(own, dtype=dtype).view(num_rows, width)

    def row_bytes(self, width: int, dtype: torch.dtype) -> int | None:
        """The row's size in memory."""
        return width * dtype.itemsize


class Zstd(Raw):
    """zstd frames of blocks of rows."""

    name = "zstd"
    error = "none: bit for bit"

    def encode(self, rows: torch.Tensor) -> Bytes:
        """One frame."""
        import pyarrow

        if not rows.numel():
            return b""
        codec = pyarrow.Codec("zstd", compression_level=1)
        return codec.compress(raw_bytes(rows), asbytes=True)

    def reconstruct(
        self, data: Bytes, num_rows: int, width: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """The rows of one frame."""
        import pyarrow

        size = num_rows * width * dtype.itemsize
        if size:
            data = pyarrow.decompress(bytes(data), size, "zstd", asbytes=True)
        return super().reconstruct(data, num_rows, width, dtype)

    def row_bytes(self, width: int, dtype: torch.dtype) -> int | None:
        """Frames hold several rows."""
        return None


class Full8(Codec):
    """Eight bits per value and one scale per row: `[float32 scale][int8 * width]`."""

    name = "full8"
    error = (
        "each value by at most 1/254 of the largest magnitude of its row, plus the "
        "rounding to the dtype; a row with NaN or infinity becomes NaN"
    )

    def encode(self, rows: torch.Tensor) -> Bytes:
        """Records of `width + 4` bytes."""
        return encode_full8(rows)

    def reconstruct(
        self, data: Bytes, num_rows: int, width: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Scale times integer."""
        return decode_full8(data, num_rows, width, dtype)

    def row_bytes(self, width: int, dtype: torch.dtype) -> int | None:
        """A byte per value, and the scale."""
        return width + 4


class RandomProjection8(Codec):
    """The row's coordinates in a random subspace of `k` dimensions, as `full8`.

    The subspace is spanned by orthonormal columns that follow from the seed, so
    a row is reconstructed as its projection; with `k` = width only the
    quantization is lost. Distances and angles between rows keep their order on
    average, for rows that have no relation to the seed.
    """

    name = "rp8"
    error = (
        "the part of the row outside of the subspace, on average a share of "
        "1 - k/width of its squared length, and full8's error in the subspace"
    )

    def __init__(self, k: int, seed: int) -> None:
        self.k, self.seed = k, seed

    def encode(self, rows: torch.Tensor) -> Bytes:
        """Records of `k + 4` bytes, `k` capped at the width."""
        values = rows.to(torch.float32).numpy()
        basis = orthonormal_basis(values.shape[1], self._k(values.shape[1]), self.seed)
        return Full8().encode(torch.from_numpy(values @ basis))

    def reconstruct(
        self, data: Bytes, num_rows: int, width: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """The projection of each row, in the original space."""
        k = self._k(width)
        inner = Full8().reconstruct(data, num_rows, k, torch.float32).numpy()
        basis = orthonormal_basis(width, k, self.seed)
        return torch.from_numpy(inner @ basis.T).to(dtype)

    def row_bytes(self, width: int, dtype: torch.dtype) -> int | None:
        """A byte per dimension kept, and the scale."""
        return self._k(width) + 4

    def _k(self, width: int) -> int:
        return min(self.k, width)

    def describe(self) -> dict[str, Any]:
        """Name, dimensions and seed."""
        return {"name": self.name, "k": self.k, "seed": self.seed}


class TopK8(Codec):
    """The `k` largest values of a row: `[float32 scale][uint32 * k][int8 * k]`."""

    name = "topk8"
    error = (
        "kept values as with full8; the others become 0 and are no larger than the "
        "smallest one kept; a row with NaN or infinity becomes NaN where it is kept"
    )

    def __init__(self, k: int) -> None:
        self.k = k

    def encode(self, rows: torch.Tensor) -> Bytes:
        """Records of `5 * k + 4` bytes, `k` capped at the width."""
        return encode_topk8(rows, min(self.k, rows.shape[1]))

    def reconstruct(
        self, data: Bytes, num_rows: int, width: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Zeros, with the kept values in their places."""
        record = np.frombuffer(
            data, dtype=topk8_record(min(self.k, width)), count=num_rows
        )
        rows = np.zeros((num_rows, width), dtype=np.float32)
        values = dequantize(record["scale"], record["q"])
        np.put_along_axis(rows, record["index"].astype(np.int64), values, axis=1)
        return torch.from_numpy(rows).to(dtype)

    def row_bytes(self, width: int, dtype: torch.dtype) -> int | None:
        """Index and byte per value kept, and the scale."""
        return 5 * min(self.k, width) + 4

    def describe(self) -> dict[str, Any]:
        """Name and how many values are kept."""
        return {"name": self.name, "k": self.k}


def parse_codec(text: Any, where: str) -> Codec:
    """The codec that a name stands for.

    The names are `raw`, `zstd`, `full8`, `rp8:K`, `rp8:K:SEED` and `topk8:K`; without
    `K` it is 256 dimensions or 64 values.

    Raises:
        CaptureValidationError: it is none of these.

    """
    name, *numbers = text.split(":") if isinstance(text, str) else ("",)
    allowed = {"rp8": 2, "topk8": 1}.get(name, 0)
    good = name in CODECS and len(numbers) <= allowed
    if not good or not all(number.isascii() and number.isdigit() for number in numbers):
        raise CaptureValidationError(
            f"{where} must be raw, zstd, full8, rp8:K (or rp8:K:SEED) or topk8:K, "
            "for example rp8:256",
            parameter=where,
            value=repr(text),
        )
    description: dict[str, Any] = {"name": name}
    for field, number in zip(("k", "seed"), numbers):
        description[field] = int(number)
    if description.get("k", 1) < 1 or description.get("seed", 0) >= 1 << 63:
        raise CaptureValidationError(
            f"{where}: K must be above 0, and SEED below 2**63",
            parameter=where,
            value=repr(text),
        )
    return codec_of(description)


def codec_of(description: dict[str, Any]) -> Codec:
    """The codec that a sidecar describes.

    Raises:
        ValueError: there is no such codec.

    """
    name = description["name"]
    if name == "rp8":
        return RandomProjection8(description.get("k", 256), description.get("seed", 0))
    if name == "topk8":
        return TopK8(description.get("k", 64))
    simple: dict[str, type[Codec]] = {"raw": Raw, "zstd": Zstd, "full8": Full8}
    if name not in simple:
        raise ValueError(f"there is no codec {name!r}; there are {list(CODECS)}")
    return simple[name]()


@lru_cache(maxsize=8)
def orthonormal_basis(width: int, k: int, seed: int) -> np.ndarray[Any, Any]:
    """`[width, k]` float32 with orthonormal columns, a function of its arguments."""
    generator = np.random.Generator(np.random.PCG64(seed))
    gaussian = generator.standard_normal((width, k))
    basis, upper = np.linalg.qr(gaussian)
    # The factorization leaves the columns' signs open.
    return (basis * np.sign(np.diag(upper))).astype(np.float32)

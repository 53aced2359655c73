# SPDX-License-Identifier: Apache-2.0
"""Codecs between rows and bytes: raw, lossless compression, or with a stated error.

All codecs work on single rows or on blocks of rows, so that a reader can access a
position without decoding everything before it. A sidecar holds `describe()`, from which
`codec_of` creates the codec that decodes the bytes. `KeyEncoder` applies a codec to the
blocks of a key while they are written.

The checksum of encoded bytes is CRC32C with the reflected polynomial of RFC 3720,
section 12.1; its appendix B.4 has test vectors.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from functools import cache, lru_cache
from importlib import import_module
from typing import Any, ClassVar, Protocol, cast

import numpy as np
import torch

from vllm.logger import init_logger
from vllm.v1.capture.consumers.storage.quantize import (
    decode_full8,
    dequantize,
    encode_full8,
    encode_topk8,
    topk8_record,
)
from vllm.v1.capture.delivery.row_bytes import raw_bytes
from vllm.v1.capture.errors import CaptureValidationError
from vllm.v1.residual.native import Bytes

logger = init_logger(__name__)

CODECS = ("raw", "zstd", "full8", "rp8", "topk8")

BLOCK_BYTES = 4 << 20
"""Approximate size of the blocks of rows that are encoded at once."""


class Codec(ABC):
    """Encodes rows `[rows, width]` of any float dtype."""

    name: ClassVar[str]
    error: ClassVar[str]
    """The error of the reconstructed rows, in words."""

    @abstractmethod
    def encode(self, rows: torch.Tensor) -> Bytes:
        """Encode a block of rows `[rows, width]`."""

    @abstractmethod
    def reconstruct(
        self, data: Bytes, num_rows: int, width: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Decode bytes from `encode` to rows `[num_rows, width]` of `dtype`."""

    def row_bytes(self, width: int, dtype: torch.dtype) -> int | None:
        """Encoded bytes per row; None if rows of a block are encoded together."""
        return None

    def describe(self) -> dict[str, Any]:
        """Name and parameters, from which `codec_of` recreates the codec."""
        return {"name": self.name}


class Raw(Codec):
    """The row-major bytes of the rows in their own dtype."""

    name = "raw"
    error = "none: bit for bit"

    def encode(self, rows: torch.Tensor) -> Bytes:
        """The bytes, without a copy if the rows are contiguous."""
        return raw_bytes(rows)

    def reconstruct(
        self, data: Bytes, num_rows: int, width: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """The rows, in the memory of `data` if it is writable."""
        if not num_rows:
            return torch.empty(0, width, dtype=dtype)
        view = memoryview(data)
        own = bytearray(view) if view.readonly else view
        return torch.frombuffer(own, dtype=dtype).view(num_rows, width)

    def row_bytes(self, width: int, dtype: torch.dtype) -> int | None:
        """Bytes of a row in memory."""
        return width * dtype.itemsize


class Zstd(Raw):
    """Each block of rows as one zstd frame."""

    name = "zstd"
    error = "none: bit for bit"

    def encode(self, rows: torch.Tensor) -> Bytes:
        """Compress a block to one frame."""
        import pyarrow

        if not rows.numel():
            return b""
        codec = pyarrow.Codec("zstd", compression_level=1)
        return codec.compress(raw_bytes(rows), asbytes=True)

    def reconstruct(
        self, data: Bytes, num_rows: int, width: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Decompress one frame."""
        import pyarrow

        size = num_rows * width * dtype.itemsize
        if size:
            data = pyarrow.decompress(bytes(data), size, "zstd", asbytes=True)
        return super().reconstruct(data, num_rows, width, dtype)

    def row_bytes(self, width: int, dtype: torch.dtype) -> int | None:
        """None: a frame holds several rows."""
        return None


class Full8(Codec):
    """8 bits per value and one scale per row: `[float32 scale][int8 * width]`."""

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
        """Multiply integers by the scale."""
        return decode_full8(data, num_rows, width, dtype)

    def row_bytes(self, width: int, dtype: torch.dtype) -> int | None:
        """One byte per value, and the scale."""
        return width + 4


class RandomProjection8(Codec):
    """The coordinates of a row in a random `k`-dimensional subspace, as `full8`.

    The subspace has an orthonormal basis that is generated from the seed. A row is
    reconstructed as its projection onto the subspace; with `k` equal to the width the
    only error is that of quantization. For rows that do not depend on the seed,
    distances and angles between rows keep their order on average.
    """

    name = "rp8"
    error = (
        "the part of the row outside of the subspace, on average a share of "
        "1 - k/width of its squared length, and full8's error in the subspace"
    )

    def __init__(self, k: int, seed: int) -> None:
        self.k, self.seed = k, seed

    def encode(self, rows: torch.Tensor) -> Bytes:
        """Records of `k + 4` bytes, with `k` limited to the width."""
        values = rows.to(torch.float32).numpy()
        basis = orthonormal_basis(values.shape[1], self._k(values.shape[1]), self.seed)
        return Full8().encode(torch.from_numpy(values @ basis))

    def reconstruct(
        self, data: Bytes, num_rows: int, width: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """The projection of each row, in the original coordinates."""
        k = self._k(width)
        inner = Full8().reconstruct(data, num_rows, k, torch.float32).numpy()
        basis = orthonormal_basis(width, k, self.seed)
        return torch.from_numpy(inner @ basis.T).to(dtype)

    def row_bytes(self, width: int, dtype: torch.dtype) -> int | None:
        """One byte per dimension of the subspace, and the scale."""
        return self._k(width) + 4

    def _k(self, width: int) -> int:
        return min(self.k, width)

    def describe(self) -> dict[str, Any]:
        """Name, number of dimensions and seed."""
        return {"name": self.name, "k": self.k, "seed": self.seed}


class TopK8(Codec):
    """The `k` values of largest magnitude of a row, with their indices.

    A record is `[float32 scale][uint32 index * k][int8 * k]`.
    """

    name = "topk8"
    error = (
        "kept values as with full8; the others become 0 and are no larger than the "
        "smallest one kept; a row with NaN or infinity becomes NaN where it is kept"
    )

    def __init__(self, k: int) -> None:
        self.k = k

    def encode(self, rows: torch.Tensor) -> Bytes:
        """Records of `5 * k + 4` bytes, with `k` limited to the width."""
        return encode_topk8(rows, min(self.k, rows.shape[1]))

    def reconstruct(
        self, data: Bytes, num_rows: int, width: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """The kept values at their indices, zero elsewhere."""
        record = np.frombuffer(
            data, dtype=topk8_record(min(self.k, width)), count=num_rows
        )
        rows = np.zeros((num_rows, width), dtype=np.float32)
        values = dequantize(record["scale"], record["q"])
        np.put_along_axis(rows, record["index"].astype(np.int64), values, axis=1)
        return torch.from_numpy(rows).to(dtype)

    def row_bytes(self, width: int, dtype: torch.dtype) -> int | None:
        """Four bytes of index and one of value per kept value, and the scale."""
        return 5 * min(self.k, width) + 4

    def describe(self) -> dict[str, Any]:
        """Name and number of kept values."""
        return {"name": self.name, "k": self.k}


def parse_codec(text: Any, where: str) -> Codec:
    """Parse the name of a codec.

    Args:
        text: `raw`, `zstd`, `full8`, `rp8[:K[:SEED]]` or `topk8[:K]`. The default of
            `K` is 256 dimensions for `rp8` and 64 values for `topk8`.
        where: the parameter's name in messages.

    Raises:
        CaptureValidationError: `text` is none of these.

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
    """Create the codec from its description in a sidecar.

    Raises:
        ValueError: the codec is unknown.

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
    """A random `[width, k]` float32 matrix with orthonormal columns.

    It is determined by the arguments: the QR factorization of Gaussian values.
    """
    generator = np.random.Generator(np.random.PCG64(seed))
    gaussian = generator.standard_normal((width, k))
    basis, upper = np.linalg.qr(gaussian)
    # The signs of the columns are not unique in a QR factorization, so fix them.
    return (basis * np.sign(np.diag(upper))).astype(np.float32)


class KeyEncoder:
    """Encodes the blocks of a key while they are written."""

    def __init__(self, codec: Codec, width: int, dtype: torch.dtype) -> None:
        self._codec = codec
        self._fixed = codec.row_bytes(width, dtype) is not None
        self._blocks: list[tuple[int, int]] = []
        self.num_bytes = 0
        """Bytes that `encode` has yielded so far."""
        self.checksum: int | None = crc32c(b"")
        """CRC32C of these bytes; None if the package `crc32c` is not installed."""

    def encode(self, blocks: Iterable[torch.Tensor]) -> Iterator[Bytes]:
        """Yield the encoded blocks; `blocks` are rows `[rows, width]`."""
        plain = self._codec.name == "raw"
        for block in blocks if plain else joined(blocks, BLOCK_BYTES):
            data = self._codec.encode(block)
            self.num_bytes += len(data)
            if self.checksum is not None:
                self.checksum = crc32c(data, self.checksum)
            if not self._fixed:
                self._blocks.append((len(block), len(data)))
            yield data

    def describe(self) -> dict[str, Any]:
        """The codec's description, with `blocks` as a list of `[rows, bytes]`.

        `blocks` is missing if all rows have the same encoded size.
        """
        description = self._codec.describe()
        if not self._fixed:
            description["blocks"] = self._blocks
        return description


def joined(blocks: Iterable[torch.Tensor], size: int) -> Iterator[torch.Tensor]:
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


class _Crc32c(Protocol):
    def crc32c(self, data: Bytes, value: int = 0) -> int:
        """Continue the checksum `value` with `data`."""


def crc32c(data: Bytes, before: int = 0) -> int | None:
    """Continue the CRC32C `before` with `data`.

    None if the package `crc32c` is not installed.
    """
    library = _library()
    return None if library is None else library.crc32c(data, before)


@cache
def _library() -> _Crc32c | None:
    try:
        return cast(_Crc32c, import_module("crc32c"))
    except ImportError as error:
        logger.warning(
            "Files of captured rows are written and read without checksums: %s", error
        )
        return None

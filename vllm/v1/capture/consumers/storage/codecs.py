# SPDX-License-Identifier: Apache-2.0
"""Codecs between rows and bytes: raw, or compressed without loss.

Both work on blocks of rows, so that a reader can access a position without decoding
everything before it. A sidecar holds the description that `KeyEncoder` gives, from
which `codec_of` creates the codec that decodes the bytes.

The checksum of encoded bytes is CRC32C with the reflected polynomial of RFC 3720,
section 12.1; its appendix B.4 has test vectors.
"""

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import torch
from crc32c import crc32c

from vllm.v1.capture.delivery.row_bytes import raw_bytes
from vllm.v1.capture.errors import CaptureValidationError
from vllm.v1.residual.native import Bytes

BLOCK_BYTES = 4 << 20
"""Approximate size of the blocks of rows that are encoded at once."""


class Codec:
    """The row-major bytes of the rows in their own dtype."""

    name: ClassVar[str] = "raw"

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
        """Encoded bytes per row; None if rows of a block are encoded together."""
        return width * dtype.itemsize


class Zstd(Codec):
    """Each block of rows as one zstd frame."""

    name = "zstd"

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
        """None, because a frame holds several rows."""
        return None


CODECS: dict[str, type[Codec]] = {"raw": Codec, "zstd": Zstd}


def parse_codec(text: Any, where: str) -> Codec:
    """Parse the name of a codec, `raw` or `zstd`.

    Args:
        text: the name.
        where: the parameter's name in messages.

    Raises:
        CaptureValidationError: `text` is neither.

    """
    if isinstance(text, str) and text in CODECS:
        return CODECS[text]()
    raise CaptureValidationError(
        f"{where} must be raw or zstd, which keep every bit",
        parameter=where,
        value=repr(text),
    )


def codec_of(description: dict[str, Any]) -> Codec:
    """Create the codec from its description in a sidecar.

    Raises:
        ValueError: the codec is unknown.

    """
    name = description["name"]
    if name not in CODECS:
        raise ValueError(
            f"there is no codec {name!r}; there are {list(CODECS)}. Read the file with "
            "the version that wrote it"
        )
    return CODECS[name]()


class KeyEncoder:
    """Encodes the blocks of a key while they are written."""

    def __init__(self, codec: Codec, width: int, dtype: torch.dtype) -> None:
        self._codec = codec
        self._fixed = codec.row_bytes(width, dtype) is not None
        self._blocks: list[tuple[int, int]] = []
        self.num_bytes = 0
        """Bytes that `encode` has yielded so far."""
        self.checksum = crc32c(b"")
        """CRC32C of these bytes."""

    def encode(self, blocks: Iterable[torch.Tensor]) -> Iterator[Bytes]:
        """Yield the encoded blocks; `blocks` are rows `[rows, width]`."""
        for block in blocks if self._fixed else in_batches(blocks, BLOCK_BYTES):
            data = self._codec.encode(block)
            self.num_bytes += len(data)
            self.checksum = crc32c(data, self.checksum)
            if not self._fixed:
                self._blocks.append((len(block), len(data)))
            yield data

    def describe(self) -> dict[str, Any]:
        """The codec's name, with `blocks` as a list of `[rows, bytes]`.

        `blocks` is missing if all rows have the same encoded size.
        """
        description: dict[str, Any] = {"name": self._codec.name}
        if not self._fixed:
            description["blocks"] = self._blocks
        return description


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

# SPDX-License-Identifier: Apache-2.0
"""Encoding of a key's rows to bytes, with their checksum and description.

The checksum is CRC32C with the reflected polynomial of RFC 3720, section 12.1; its
appendix B.4 has test vectors.
"""

from collections.abc import Iterable, Iterator
from functools import cache
from importlib import import_module
from typing import Any, Protocol, cast

import torch

from vllm.logger import init_logger
from vllm.v1.capture.consumers.storage.codecs import Codec
from vllm.v1.residual.native import Bytes

logger = init_logger(__name__)

BLOCK_BYTES = 4 << 20
"""Approximate size of the blocks of rows that are encoded at once."""


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

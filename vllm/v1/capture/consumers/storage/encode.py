# SPDX-License-Identifier: Apache-2.0
"""The bytes of one key, and what a reader must know of them.

The checksum is CRC32C: the polynomial of RFC 3720, section 12.1, reflected. Appendix
B.4 there has test vectors.
"""

from collections.abc import Iterable, Iterator
from functools import cache
from importlib import import_module
from typing import Any, Protocol, cast

import torch

from vllm.logger import init_logger
from vllm.v1.capture.consumers.storage.codecs import Codec
from vllm.v1.capture.native import Bytes

logger = init_logger(__name__)

BLOCK_BYTES = 4 << 20
"""Rows are encoded in blocks of about this size."""


class KeyEncoder:
    """Encodes a key's blocks while they are written."""

    def __init__(self, codec: Codec, width: int, dtype: torch.dtype) -> None:
        self._codec = codec
        self._fixed = codec.row_bytes(width, dtype) is not None
        self._blocks: list[tuple[int, int]] = []
        self.num_bytes = 0
        """Bytes that `encode` has yielded so far."""
        self.checksum: int | None = crc32c(b"")
        """CRC32C of them; None if it is not computed here."""

    def encode(self, blocks: Iterable[torch.Tensor]) -> Iterator[Bytes]:
        """The encoded blocks, one after the other."""
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
        """The codec, and `blocks` of `[rows, bytes]` where rows differ in size."""
        description = self._codec.describe()
        if not self._fixed:
            description["blocks"] = self._blocks
        return description


def joined(blocks: Iterable[torch.Tensor], size: int) -> Iterator[torch.Tensor]:
    """The same rows in blocks of about `size` bytes."""
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
        """The checksum of what has the checksum `value`, followed by `data`."""


def crc32c(data: Bytes, before: int = 0) -> int | None:
    """The checksum of what has the checksum `before`, followed by `data`.

    None where the package `crc32c` is not installed.
    """
    library = _library()
    return None if library is None else library.crc32c(data, before)


@cache
def _library() -> _Crc32c | None:
    try:
        return cast(_Crc32c, import_module("crc32c"))
    except ImportError as error:
        logger.warning(
            "Files of captured rows have no checksums, and none is verified: %s", error
        )
        return None

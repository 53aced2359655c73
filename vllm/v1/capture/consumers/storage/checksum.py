# SPDX-License-Identifier: Apache-2.0
"""CRC32C of a key's bytes, so that a reader notices damage.

The polynomial is that of RFC 3720, section 12.1, reflected; appendix B.4 there has
test vectors.
"""

from functools import cache

from vllm.v1.capture.consumers.storage.files import Bytes
from vllm.v1.capture.native import library

_REFLECTED = 0x82F63B78


def crc32c(data: Bytes, before: int = 0) -> int | None:
    """The checksum of what has the checksum `before`, followed by `data`.

    None without the native library: computing it here would take longer than
    writing.
    """
    native = library()
    return None if native is None else native.crc32c(data, before)


def crc32c_reference(data: Bytes, before: int = 0) -> int:
    """The same, a byte at a time."""
    crc = before ^ 0xFFFFFFFF
    table = _table()
    for byte in bytes(data):
        crc = (crc >> 8) ^ table[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


@cache
def _table() -> tuple[int, ...]:
    def remainder(byte: int) -> int:
        for _ in range(8):
            byte = (byte >> 1) ^ (_REFLECTED if byte & 1 else 0)
        return byte

    return tuple(map(remainder, range(256)))

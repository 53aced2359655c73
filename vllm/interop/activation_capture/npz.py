# SPDX-License-Identifier: Apache-2.0
"""Writes `.npz` files of small arrays, in a quarter of the time of `numpy.savez`.

An `.npz` file is a ZIP archive of `.npy` files. `numpy.savez` creates it through a
general writer of archives, which takes as long as quantizing a sequence of 100 tokens.

Formats: PKWARE's APPNOTE.TXT, sections 4.3.7 (local header), 4.3.12 (central directory)
and 4.3.16 (its end); `numpy.lib.format`.
"""

import io
import struct
import zlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

_VERSION = 20
"""The ZIP version that a reader must support: 2.0."""
_DATE = 0x21
"""1 January 1980, the first date of ZIP: equal arrays give equal files."""
_LIMIT = 1 << 31
"""Bytes from which `numpy.savez` writes the file, which may need ZIP64."""

Array = np.ndarray[Any, Any]


def npz_bytes(arrays: Mapping[str, Array]) -> bytes:
    """The content of an uncompressed `.npz` file with these arrays, by name."""
    if sum(array.nbytes for array in arrays.values()) >= _LIMIT:
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)  # type: ignore[arg-type]  # no allow_pickle
        return buffer.getvalue()
    parts: list[bytes] = []
    directory: list[bytes] = []
    offset = 0
    for name, array in arrays.items():
        file = f"{name}.npy".encode()
        head, body = _npy_head(array.dtype.str, array.shape), array.tobytes()
        size, crc = len(head) + len(body), zlib.crc32(body, zlib.crc32(head))
        # Both headers share these fields: flags and method (stored) are 0.
        shared = (_VERSION, 0, 0, 0, _DATE, crc, size, size, len(file), 0)
        local = struct.pack("<4s5H3L2H", b"PK\3\4", *shared) + file
        central = (b"PK\1\2", _VERSION, *shared, 0, 0, 0, 0, offset)
        directory.append(struct.pack("<4s6H3L5H2L", *central) + file)
        parts += [local, head, body]
        offset += len(local) + size
    count, length = len(directory), sum(map(len, directory))
    ends = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count, count, length, offset, 0)
    return b"".join([*parts, *directory, ends])


@lru_cache(maxsize=1024)
def _npy_head(dtype: str, shape: tuple[int, ...]) -> bytes:
    """The head of an `.npy` file in C order."""
    buffer = io.BytesIO()
    about = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, about)
    return buffer.getvalue()

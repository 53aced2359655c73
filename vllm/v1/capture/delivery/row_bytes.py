# SPDX-License-Identifier: Apache-2.0
"""Rows as bytes, and bytes to and from files with few system calls."""

import ctypes
import os
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch

from vllm.v1.capture.native import Bytes

_MAX_BUFFERS = 1024  # IOV_MAX of Linux


def raw_bytes(rows: torch.Tensor) -> memoryview:
    """Rows as row-major bytes in their own dtype; bfloat16 as its 16 bits."""
    if rows.numel() == 0:
        return memoryview(b"")
    contiguous = rows.contiguous()
    return memoryview(contiguous.view(torch.uint8).numpy()).cast("B")  # type: ignore[arg-type]


def write_all(
    file: int, buffers: Iterable[Bytes], max_bytes: int, offset: int = 0
) -> int:
    """Write buffers one after the other to an open file, from `offset` on.

    A system call gets as many of them as have up to `max_bytes` together; a larger
    buffer is written by several. Returns the number of bytes written.

    Raises:
        OSError: the file system does not take them; some may be written.

    """
    end = offset
    batch: list[memoryview] = []
    size = 0
    for buffer in buffers:
        view = memoryview(buffer)
        if batch and (size + len(view) > max_bytes or len(batch) == _MAX_BUFFERS):
            end += _write_batch(file, batch, end)
            batch, size = [], 0
        while len(view) > max_bytes:
            end += _write_batch(file, [view[:max_bytes]], end)
            view = view[max_bytes:]
        batch.append(view)
        size += len(view)
    if batch:
        end += _write_batch(file, batch, end)
    return end - offset


def _write_batch(file: int, batch: list[memoryview], offset: int) -> int:
    total = sum(map(len, batch))
    written = os.pwritev(file, batch, offset)
    while written < total:  # a full disk or a signal: the next call says which
        left, skipped = [], written
        for view in batch:
            if skipped < len(view):
                left.append(view[skipped:])
            skipped = max(skipped - len(view), 0)
        written += os.pwritev(file, left, offset + written)
    return total


def read_rows(
    file: int, offset: int, num_rows: int, width: int, dtype: torch.dtype
) -> torch.Tensor:
    """Rows `[num_rows, width]` from an open file.

    Raises:
        OSError: the file ends before.

    """
    data = bytearray(num_rows * width * dtype.itemsize)
    view, done = memoryview(data), 0
    while done < len(data):
        got = os.preadv(file, [view[done:]], offset + done)
        if not got:
            raise OSError(f"a file of rows ends after {done} of {len(data)} bytes")
        done += got
    if not data:
        return torch.empty(num_rows, width, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).view(num_rows, width)


def write_scattered(
    file: int, addresses: npt.NDArray[np.uint64], size: int, offset: int
) -> int:
    """Write pieces of memory of `size` bytes each, one after the other.

    They are written from where they lie, up to 1024 by a system call. Whoever calls
    holds the memory. Returns the number of bytes written.

    Raises:
        OSError: the file system does not take them; some may be written.

    """
    total, done = len(addresses) * size, 0
    while done < total:
        first, skipped = divmod(done, size)
        parts = np.empty((min(len(addresses) - first, _MAX_BUFFERS), 2), np.uint64)
        parts[:, 0] = addresses[first : first + len(parts)]
        parts[:, 1] = size
        parts[0, 0] += skipped
        parts[0, 1] -= skipped
        written = _pwritev(file, parts.ctypes.data, len(parts), offset + done)
        if written < 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        done += written
    return done


_pwritev = ctypes.CDLL(None, use_errno=True).pwritev64
_pwritev.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)
_pwritev.restype = ctypes.c_ssize_t

# SPDX-License-Identifier: Apache-2.0
"""Rows as bytes, and file input and output with few system calls."""

import ctypes
import os
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch

from vllm.v1.residual.native import Bytes

_MAX_BUFFERS = 1024  # IOV_MAX of Linux


def raw_bytes(rows: torch.Tensor) -> memoryview:
    """The row-major bytes of rows in their own dtype, without a copy if contiguous."""
    if rows.numel() == 0:
        return memoryview(b"")
    contiguous = rows.contiguous()
    return memoryview(contiguous.view(torch.uint8).numpy()).cast("B")  # type: ignore[arg-type]


def write_all(
    file: int, buffers: Iterable[Bytes], max_bytes: int, offset: int = 0
) -> None:
    """Write buffers consecutively to an open file with `pwritev(2)`.

    Args:
        file: descriptor of the file.
        buffers: what to write.
        max_bytes: maximum bytes per system call; larger buffers are split.
        offset: where in the file to start.

    Raises:
        OSError: the write failed; some bytes may be written.

    """
    batch: list[memoryview] = []
    size = 0
    for buffer in buffers:
        view = memoryview(buffer)
        if batch and (size + len(view) > max_bytes or len(batch) == _MAX_BUFFERS):
            offset += _write_batch(file, batch, offset)
            batch, size = [], 0
        while len(view) > max_bytes:
            offset += _write_batch(file, [view[:max_bytes]], offset)
            view = view[max_bytes:]
        batch.append(view)
        size += len(view)
    if batch:
        _write_batch(file, batch, offset)


def _write_batch(file: int, batch: list[memoryview], offset: int) -> int:
    total = sum(map(len, batch))
    written = os.pwritev(file, batch, offset)
    while written < total:  # Short write: a signal, or a full disk, which then raises.
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
    """Read rows `[num_rows, width]` from an open file, from the byte `offset` on.

    Raises:
        OSError: the read failed, or the file is too short.

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
) -> None:
    """Write pieces of memory consecutively to an open file, up to 1024 per call.

    Args:
        file: descriptor of the file.
        addresses: of the pieces; the caller keeps the memory alive.
        size: bytes of each piece.
        offset: where in the file to start.

    Raises:
        OSError: the write failed; some bytes may be written.

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


_pwritev = ctypes.CDLL(None, use_errno=True).pwritev64
_pwritev.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)
_pwritev.restype = ctypes.c_ssize_t

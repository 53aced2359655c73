# SPDX-License-Identifier: Apache-2.0
"""Copies of rows on the host: out of staging memory, and into larger tensors.

The rows of many requests leave staging memory in a single call of the native library,
on its own threads and without the GIL. One core copies a few GB/s, which is less than
the rate of a prompt's rows. Without the library torch is used, at ten times the cost
per request, and on one thread, to which upstream limits it while serving.

The engine's thread is delayed by every time another thread takes the GIL back, so
copies are batched into as few calls as possible.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple, TypeAlias

import torch

from vllm.utils.torch_utils import available_cpu_count
from vllm.v1.residual.native import library

Numbers: TypeAlias = tuple[int, int, int, int, int, int, int]
"""The fields of the copy in `csrc/rows/gather.h`, in its order."""


class RowCopy(NamedTuple):
    """A copy of rows with constant strides to consecutive rows."""

    target: torch.Tensor  # [taps, capacity, width]
    place: int
    """Index of the first row in the target."""
    source: torch.Tensor  # [rows, hidden_size]
    first: int
    """Index in the source of the first row at the first tap."""
    num_rows: int
    tap_stride: int
    """Stride between taps, in rows of the source."""
    row_stride: int
    """Stride between rows, in rows of the source."""


def copy_rows(copies: Sequence[RowCopy]) -> None:
    """Do all copies. All tensors are contiguous."""
    if not copies:
        return
    if library() is None:
        _copy_by_torch([as_tensors(copy) for copy in copies])
        return
    by_width: dict[int, list[Numbers]] = {}
    for copy in copies:
        size = copy.source.itemsize
        width, stride = copy.target.shape[2] * size, copy.source.shape[1] * size
        numbers = (
            copy.target.data_ptr() + copy.place * width,
            copy.target.shape[1] * width,
            copy.source.data_ptr() + copy.first * stride,
            copy.tap_stride * stride,
            copy.row_stride * stride,
            copy.target.shape[0],
            copy.num_rows,
        )
        by_width.setdefault(width, []).append(numbers)
    for width, alike in by_width.items():
        _gather(alike, width)


def _gather(numbers: Sequence[Numbers], width: int) -> None:
    """Copy with the native library; `width` and all strides are in bytes."""
    native = library()
    assert native is not None, "there is only torch to copy with"
    rows = sum([copy[5] * copy[6] for copy in numbers])
    native.gather_rows(numbers, width, threads_for(rows * width))


def as_tensors(copy: RowCopy) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of target and source, `[taps, num_rows, width]`."""
    source, width = copy.source, copy.source.shape[1]
    target = copy.target.narrow(1, copy.place, copy.num_rows)
    strides = copy.tap_stride * width, copy.row_stride * width, 1
    first = source.storage_offset() + copy.first * width
    return target, source.as_strided(target.shape, strides, first)


MOST_THREADS = 6
PIECE_BYTES = 2 << 20
"""Minimum number of bytes per thread."""

Copy: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""`(target, source)` of equal shapes `[..., rows, width]`, up to three axes."""


def copy_all(copies: Sequence[Copy]) -> None:
    """Do all copies; the rows of the targets are contiguous, and all of one width.

    For what one thread copies, torch takes less time per tensor.
    """
    total = sum([target.nbytes for target, _ in copies])
    if (
        threads_for(total) < 2
        or library() is None
        or any(one.dtype != to.dtype or one.stride(-1) != 1 for to, one in copies)
    ):
        _copy_by_torch(copies)
        return
    numbers = [_numbers_of(target, source) for target, source in copies]
    target = copies[0][0]
    _gather(numbers, target.shape[-1] * target.itemsize)


def _numbers_of(target: torch.Tensor, source: torch.Tensor) -> Numbers:
    taps = len(target) if target.dim() == 3 else 1
    size = target.itemsize
    return (
        target.data_ptr(),
        target.stride(0) * size,
        source.data_ptr(),
        source.stride(0) * size,
        source.stride(-2) * size,
        taps,
        target.shape[-2],
    )


def _copy_by_torch(copies: Sequence[Copy]) -> None:
    if copies:
        targets, sources = zip(*copies)
        torch._foreach_copy_(targets, sources)


def threads_for(num_bytes: int) -> int:
    """The number of threads to use for a copy of `num_bytes`."""
    return max(1, min(num_threads(), num_bytes // PIECE_BYTES))


@cache
def num_threads() -> int:
    """The maximum number of copying threads: a quarter of the cores, from 1 to 6."""
    return max(1, min(MOST_THREADS, available_cpu_count() // 4))

# SPDX-License-Identifier: Apache-2.0
"""Copies of rows on the host: out of staging memory, and into larger tensors.

The rows of many requests leave staging memory in a single call of the native library,
on its own threads and without the GIL. Without the library torch is used, at ten times
the cost per request.

Torch copies on several threads if much is copied: one core copies a few GB/s, which is
less than the rate of a prompt's rows, and upstream limits torch to one thread while
serving. Each call of torch releases the GIL. The engine's thread is delayed by every
time another thread takes it back, so copies are batched into as few calls as possible.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache, partial
from typing import NamedTuple, TypeAlias

import torch

from vllm.utils.math_utils import cdiv
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
        copy_all([as_tensors(copy) for copy in copies])
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
"""`(target, source)` of equal shapes `[..., hidden_size]`."""


def copy_all(copies: Sequence[Copy]) -> None:
    """Do all copies, with a single call of torch per thread.

    Between two calls the GIL would change hands, which delays the engine's thread.
    """
    total = sum([target.nbytes for target, _ in copies])
    count = threads_for(total)
    if count < 2:
        _copy_some(copies)
        return
    in_parallel(
        [partial(_copy_share, share) for share in shares(copies, cdiv(total, count))]
    )


def in_parallel(tasks: Sequence[Callable[[], object]]) -> None:
    """Run tasks on as many threads; one of them is the caller's.

    Args:
        tasks: as many as `threads_for` returns, or less.

    """
    first, *others = tasks
    futures = [_pool().submit(task) for task in others]
    try:
        first()
    finally:
        wait(futures)
    for future in futures:
        future.result()


def shares(copies: Sequence[Copy], size: int) -> list[list[Copy]]:
    """Divide copies into parts of about `size` bytes; larger copies are split."""
    parts: list[list[Copy]] = []
    left = 0
    for copy in copies:
        for piece in [copy] if copy[0].nbytes <= size else cut(copy, size):
            if left <= 0:
                parts.append([])
                left = size
            parts[-1].append(piece)
            left -= piece[0].nbytes
    return parts


def cut(copy: Copy, size: int) -> list[Copy]:
    """Split a copy along its longest axis into pieces of at most about `size` bytes."""
    target, source = copy
    lengths = target.shape[:-1]
    axis = max(range(len(lengths)), key=lengths.__getitem__)
    pieces = min(cdiv(target.nbytes, size), lengths[axis])
    return list(
        zip(target.tensor_split(pieces, axis), source.tensor_split(pieces, axis))
    )


def _copy_share(share: list[Copy]) -> None:
    _copy_some(share)
    share.clear()  # The pool's thread may keep it longer than the caller waits.


def _copy_some(copies: Sequence[Copy]) -> None:
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


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(num_threads() - 1, 1), "capture-copy")

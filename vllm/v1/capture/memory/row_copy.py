# SPDX-License-Identifier: Apache-2.0
"""Copies the rows of many requests out of staging memory in a single call.

The native library does it on its own threads and without the GIL. Without the library,
torch is used, at ten times the cost per request.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch

from vllm.v1.capture.memory.parallel_copy import copy_all, threads_for
from vllm.v1.residual.native import library

Numbers: TypeAlias = tuple[int, int, int, int, int, int, int]
"""The fields of the copy in `csrc/rows/gather.h`, in its order."""


class RowCopy(NamedTuple):
    """A copy of rows with constant strides to consecutive rows."""

    target: torch.Tensor  # [taps, capacity, hidden_size]
    place: int
    """Index of the first row in the target."""
    source: torch.Tensor  # [rows, hidden_size]
    first: int
    """Index in the source of the first row at the first tap."""
    num_rows: int
    apart: int
    """Stride between taps, in rows of the source."""
    distance: int
    """Stride between rows, in rows of the source."""


def copy_rows(copies: Sequence[RowCopy]) -> None:
    """Do all copies. All rows have the same size, and all tensors are contiguous."""
    if not copies:
        return
    if library() is None:
        copy_all([as_tensors(copy) for copy in copies])
        return
    width = copies[0].source.shape[1] * copies[0].source.itemsize
    numbers = [
        (
            copy.target.data_ptr() + copy.place * width,
            copy.target.shape[1] * width,
            copy.source.data_ptr() + copy.first * width,
            copy.apart * width,
            copy.distance * width,
            copy.target.shape[0],
            copy.num_rows,
        )
        for copy in copies
    ]
    _gather(numbers, width)


def _gather(numbers: Sequence[Numbers], width: int) -> None:
    """Copy with the native library; `width` and all strides are in bytes."""
    native = library()
    assert native is not None, "there is only torch to copy with"
    rows = sum([copy[5] * copy[6] for copy in numbers])
    native.gather_rows(numbers, width, threads_for(rows * width))


def as_tensors(copy: RowCopy) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of target and source, `[taps, num_rows, hidden_size]`."""
    source, width = copy.source, copy.source.shape[1]
    target = copy.target.narrow(1, copy.place, copy.num_rows)
    strides = copy.apart * width, copy.distance * width, 1
    first = source.storage_offset() + copy.first * width
    return target, source.as_strided(target.shape, strides, first)

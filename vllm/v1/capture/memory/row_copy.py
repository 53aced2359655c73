# SPDX-License-Identifier: Apache-2.0
"""Copying requests' rows out of steps' memory: a single call for those of many.

The compiled library does it, where there is one, on threads of its own and without the
interpreter's lock. torch does the same, at ten times the work for each request.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch

from vllm.v1.capture.memory.parallel_copy import copy_all, threads_for
from vllm.v1.capture.native import library

Numbers: TypeAlias = tuple[int, int, int, int, int, int, int]
"""The fields of `csrc/rows/gather.h`."""


class RowCopy(NamedTuple):
    """Rows at equal distances, to be put one behind the other."""

    target: torch.Tensor  # [taps, capacity, hidden_size]
    place: int
    """Where in the target the first row goes."""
    source: torch.Tensor  # [rows, hidden_size]
    first: int
    """Where in the source the first row is, at the first tap."""
    num_rows: int
    apart: int
    """From each tap to the next, in rows of the source; ..."""
    distance: int
    """... and from each row to the next."""


def copy_rows(copies: Sequence[RowCopy]) -> None:
    """Do them all. All rows have one size, and tensors are contiguous."""
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
    """`width` is that of a row in bytes, as are the distances in the numbers."""
    native = library()
    assert native is not None, "there is only torch to copy with"
    rows = sum([copy[5] * copy[6] for copy in numbers])
    native.gather_rows(numbers, width, threads_for(rows * width))


def as_tensors(copy: RowCopy) -> tuple[torch.Tensor, torch.Tensor]:
    """Target and source, `[taps, num_rows, hidden_size]`."""
    source, width = copy.source, copy.source.shape[1]
    target = copy.target.narrow(1, copy.place, copy.num_rows)
    strides = copy.apart * width, copy.distance * width, 1
    first = source.storage_offset() + copy.first * width
    return target, source.as_strided(target.shape, strides, first)

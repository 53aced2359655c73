# SPDX-License-Identifier: Apache-2.0
"""A pool of host memory for captured rows, and the copies into it.

The first write to new memory costs several times as much as a copy, because the kernel
must find and clear each page. Rows are short-lived, so their memory is reused for later
rows. It is shared memory, so that front ends can map it without a copy. Free parts of
it are found by first fit.

The rows of many requests leave staging memory in a single call of the native library,
on its own threads and without the GIL. One core copies a few GB/s, which is less than
the rate of a prompt's rows. Without the library torch is used, at ten times the cost
per request, and on one thread, to which upstream limits it while serving. The engine's
thread is delayed by every time another thread takes the GIL back, so copies are batched
into as few calls as possible.
"""

import threading
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from vllm.utils.math_utils import round_up
from vllm.v1.capture.memory.budget import BUDGET, HostBudget, collect_all
from vllm.v1.capture.memory.shared import ALIGNMENT, SharedSegment
from vllm.v1.residual.machine import copy_threads
from vllm.v1.residual.native import library


class Extents:
    """The free parts of `[0, size)`, allocated by first fit.

    The caller's lock guards everything but `returned`.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = [(0, size)]
        """`(start, stop)` of each, ascending and not adjacent."""
        self.returned: deque[tuple[int, int]] = deque()
        """Ranges, start and size, to free; appended without a lock, because a finalizer
        may run anywhere."""

    @property
    def is_free(self) -> bool:
        """Whether nothing is allocated."""
        self._settle()
        return self._free == [(0, self.size)]

    def _settle(self) -> None:
        while self.returned:
            self.give_back(*self.returned.popleft())

    def take(self, size: int) -> int | None:
        """Allocate `size`; returns the start, None if no free part is large enough."""
        self._settle()
        for index, (start, stop) in enumerate(self._free):
            if stop - start >= size:
                rest = [(start + size, stop)] if stop - start > size else []
                self._free[index : index + 1] = rest
                return start
        return None

    def give_back(self, start: int, size: int) -> None:
        """Free the range `[start, start + size)`."""
        stop = start + size
        index = bisect_left(self._free, (start, stop))
        if index < len(self._free) and self._free[index][0] == stop:
            stop = self._free.pop(index)[1]
        if index and self._free[index - 1][1] == start:
            index -= 1
            start = self._free.pop(index)[0]
        self._free.insert(index, (start, stop))


Bytes: TypeAlias = npt.NDArray[np.uint8]

SMALLEST = 128 << 10
"""Smaller tensors, in bytes, come from torch's allocator, which reuses memory too."""
SEGMENT_BYTES = 256 << 20
"""Size of a segment, unless a larger block is needed."""
OWNER = "row_memory"


@dataclass(slots=True, eq=False)
class Slab:
    """A segment with the free parts of it."""

    segment: SharedSegment
    extents: Extents
    needed: bool = True
    """Whether a block was allocated in it since the last `trim`."""


class Slabs:
    """Allocates tensors in slabs, by first fit; the caller's lock guards it."""

    def __init__(self) -> None:
        self.all: list[Slab] = []

    @property
    def spare(self) -> list[Slab]:
        """Those in which nothing is allocated."""
        return [slab for slab in self.all if slab.extents.is_free]

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """A tensor, whose memory is free again once its last view is gone.

        None if there is no room, not even with what front ends have returned.
        """
        num_bytes = prod(shape) * dtype.itemsize
        size = round_up(num_bytes, ALIGNMENT)
        found = self._find(size)
        if found is None:
            collect_all()
            found = self._find(size)
        if found is None:
            return None
        slab, start = found
        # Reshaped by NumPy, which is faster than torch here.
        memory = slab.segment.memory[start : start + num_bytes].reshape(
            *shape[:-1], shape[-1] * dtype.itemsize
        )
        free = weakref.finalize(memory, slab.extents.returned.append, (start, size))
        free.atexit = False
        return torch.from_numpy(memory).view(dtype)

    def _find(self, size: int) -> tuple[Slab, int] | None:
        for slab in self.all:
            start = slab.extents.take(size)
            if start is not None:
                slab.needed = True
                return slab, start
        return None


class RowMemory:
    """Allocates tensors whose memory is reused once their last view is gone.

    Thread-safe. Freeing takes no lock, because a finalizer may run anywhere.
    """

    def __init__(self, budget: HostBudget, segment_bytes: int = SEGMENT_BYTES) -> None:
        """Start without memory; segments are allocated on demand within `budget`."""
        self._budget = budget
        self._segment_bytes = segment_bytes
        self._slabs = Slabs()
        self._lock = threading.Lock()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialized CPU tensor.

        It is in ordinary memory if it is small or the budget is used up, otherwise in
        shared memory.
        """
        num_bytes = prod(shape) * dtype.itemsize
        if num_bytes < SMALLEST:
            return torch.empty(*shape, dtype=dtype)
        with self._lock:
            rows = self._slabs.take(shape, dtype)
            if rows is None and self._grow(round_up(num_bytes, ALIGNMENT)):
                rows = self._slabs.take(shape, dtype)
        if rows is None:
            self._budget.overflow(num_bytes)
            return torch.empty(*shape, dtype=dtype)
        return rows

    def cat(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Join rows `[taps, rows, width]`; a view if they are adjacent.

        The rows of a prompt that was computed in several steps are, so that the join
        of a long prompt costs nothing.
        """
        whole = adjacent(parts)
        if whole is not None:
            return whole
        taps, _, width = parts[0].shape
        num_rows = sum([part.shape[1] for part in parts])
        joined = self.empty((taps, num_rows, width), parts[0].dtype)
        copies, place = [], 0
        for part in parts:
            assert part.stride(2) == 1 and part.dtype == joined.dtype, "not rows alike"
            strides = part.stride()[:2]
            copies.append(RowCopy(joined, place, part, 0, part.shape[1], *strides))
            place += part.shape[1]
        copy_rows(copies)
        return joined

    def trim(self) -> None:
        """Return segments to the system that were unused since the last call."""
        collect_all()
        with self._lock:
            every = self._slabs.all
            kept = [slab for slab in every if slab.needed or not slab.extents.is_free]
            for slab in set(every) - set(kept):
                self._budget.give_back(OWNER, slab.segment.size)
            for slab in kept:
                slab.needed = False
            self._slabs.all = kept

    def _grow(self, size: int) -> bool:
        for wanted in (max(size, self._segment_bytes), size):
            if self._budget.take(OWNER, wanted):
                try:
                    segment = SharedSegment(wanted)
                except OSError:
                    self._budget.give_back(OWNER, wanted)
                    continue
                self._slabs.all.append(Slab(segment, Extents(wanted)))
                return True
        return False


def adjacent(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The parts as one view, if each directly follows the one before in memory.

    Args:
        parts: at least one; rows `[taps, rows, width]`, of equal shapes but for `rows`.

    Returns:
        A view of their common storage; None if they need a copy.

    """
    first = parts[0]
    if len(parts) == 1:
        return first
    strides, storage = first.stride(), first.untyped_storage().data_ptr()
    after = first.data_ptr()
    for part in parts:
        if (
            part.data_ptr() != after
            or part.stride() != strides
            or part.dtype != first.dtype
            or part.untyped_storage().data_ptr() != storage
        ):
            return None
        after += part.shape[1] * strides[1] * part.itemsize
    taps, _, width = first.shape
    num_rows = sum([part.shape[1] for part in parts])
    return first.as_strided((taps, num_rows, width), strides)


ROWS = RowMemory(BUDGET)
"""The pool of this process."""


class RowCopy(NamedTuple):
    """A copy of rows with constant strides to consecutive rows."""

    target: torch.Tensor  # [taps, capacity, width]
    place: int
    """Index of the first row in the target."""
    source: torch.Tensor  # of any shape
    first: int
    """Number of values in the source before the first row at the first tap."""
    num_rows: int
    tap_stride: int
    """Number of values from one tap to the next, in the source."""
    row_stride: int
    """Number of values from one row to the next, in the source."""


Numbers: TypeAlias = tuple[int, int, int, int, int, int, int]
"""The fields of the copy in `csrc/rows/gather.h`, in its order."""


def copy_rows(copies: Sequence[RowCopy]) -> None:
    """Do all copies. The targets, and the rows of the sources, are contiguous."""
    if not copies:
        return
    if library() is None:
        _copy_by_torch(copies)
        return
    by_width: dict[int, list[Numbers]] = {}
    for copy in copies:
        size = copy.source.itemsize
        width = copy.target.shape[2] * size
        numbers = (
            copy.target.data_ptr() + copy.place * width,
            copy.target.shape[1] * width,
            copy.source.data_ptr() + copy.first * size,
            copy.tap_stride * size,
            copy.row_stride * size,
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


def _copy_by_torch(copies: Sequence[RowCopy]) -> None:
    targets, sources = [], []
    for copy in copies:
        target = copy.target.narrow(1, copy.place, copy.num_rows)
        strides = copy.tap_stride, copy.row_stride, 1
        first = copy.source.storage_offset() + copy.first
        targets.append(target)
        sources.append(copy.source.as_strided(target.shape, strides, first))
    torch._foreach_copy_(targets, sources)


PIECE_BYTES = 2 << 20
"""Minimum number of bytes per thread."""


def threads_for(num_bytes: int) -> int:
    """The number of threads to use for a copy of `num_bytes`."""
    return max(1, min(copy_threads(), num_bytes // PIECE_BYTES))

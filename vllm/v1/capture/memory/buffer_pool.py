# SPDX-License-Identifier: Apache-2.0
"""Host memory for captured rows, used again once nobody holds them.

Memory that is new to a process costs several times what copying into it costs: the
system must find and clear each of its pages first. Rows come all the time and go as
soon as their consumer has them, so their memory is kept for the next ones. It is
shared memory, which front ends map where it lies.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from vllm.utils.math_utils import round_up
from vllm.v1.capture.memory.budget import BUDGET, HostBudget
from vllm.v1.capture.memory.extents import Extents
from vllm.v1.capture.memory.parallel_copy import copy_all
from vllm.v1.capture.memory.reclaim import collect_all
from vllm.v1.capture.memory.shared import ALIGNMENT, SharedSegment

Bytes: TypeAlias = npt.NDArray[np.uint8]
T = TypeVar("T")

SMALLEST = 128 << 10
"""Bytes below which the allocator keeps memory by itself."""
SEGMENT_BYTES = 256 << 20
"""What is taken from the system at once, if no block is larger."""
OWNER = "row_memory"


@dataclass(slots=True, eq=False)
class Slab:
    """A segment that blocks are cut from."""

    segment: SharedSegment
    extents: Extents
    needed: bool = True
    """Whether a block was taken from it since `trim`."""


class RowMemory:
    """Gives out tensors, and takes their memory back when the last view is gone.

    Safe to use from any thread. Taking back takes no lock, as it may happen wherever
    the interpreter frees an object.
    """

    def __init__(self, budget: HostBudget, segment_bytes: int = SEGMENT_BYTES) -> None:
        """Take segments of `segment_bytes` from the system, as `budget` allows."""
        self._budget = budget
        self._segment_bytes = segment_bytes
        self._slabs: list[Slab] = []
        self._returned: deque[tuple[Extents, int, int]] = deque()
        self._lock = threading.Lock()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of any content, `shape`, on the CPU; nobody else has its memory."""
        num_bytes = prod(shape) * dtype.itemsize
        if num_bytes < SMALLEST:
            return torch.empty(*shape, dtype=dtype)
        size = round_up(num_bytes, ALIGNMENT)
        with self._lock:
            found = self._take(size) or self._take_more(size)
        if found is None:
            self._budget.overflow(num_bytes)
            return torch.empty(*shape, dtype=dtype)
        slab, start = found
        # In its shape before it is torch's, whose calls take longer.
        memory = slab.segment.memory[start : start + num_bytes].reshape(
            *shape[:-1], shape[-1] * dtype.itemsize
        )
        taken = slab.extents, start, size
        return lent(memory, self._returned.append, taken).view(dtype)

    def cat(self, parts: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
        """`torch.cat` of rows; a single part is given back as it is."""
        if len(parts) == 1:
            return parts[0]
        shape = list(parts[0].shape)
        shape[dim] = sum(part.shape[dim] for part in parts)
        joined = self.empty(shape, parts[0].dtype)
        targets = joined.split([part.shape[dim] for part in parts], dim)
        copy_all(list(zip(targets, parts)))
        return joined

    def trim(self) -> None:
        """Give back to the system what was not needed since the last time."""
        collect_all()
        with self._lock:
            self._settle()
            kept = [
                slab for slab in self._slabs if slab.needed or not slab.extents.is_free
            ]
            for slab in set(self._slabs) - set(kept):
                self._budget.give_back(OWNER, slab.segment.size)
            for slab in kept:
                slab.needed = False
            self._slabs = kept

    @property
    def held_bytes(self) -> int:
        """Bytes that are taken from the system."""
        return sum(slab.segment.size for slab in list(self._slabs))

    def _take(self, size: int) -> tuple[Slab, int] | None:
        """A slab and where in it `size` bytes begin that nobody has."""
        self._settle()
        for slab in self._slabs:
            start = slab.extents.take(size)
            if start is not None:
                slab.needed = True
                return slab, start
        return None

    def _take_more(self, size: int) -> tuple[Slab, int] | None:
        """The same from what front ends have dropped meanwhile, or from the system."""
        collect_all()
        found = self._take(size)
        if found is None and self._grow(size):
            found = self._take(size)
        return found

    def _settle(self) -> None:
        while self._returned:
            extents, start, size = self._returned.popleft()
            extents.give_back(start, size)

    def _grow(self, size: int) -> bool:
        for wanted in (max(size, self._segment_bytes), size):
            if self._budget.take(OWNER, wanted):
                try:
                    segment = SharedSegment(wanted)
                except OSError:
                    self._budget.give_back(OWNER, wanted)
                    continue
                self._slabs.append(Slab(segment, Extents(wanted)))
                return True
        return False


def lent(memory: Bytes, give_back: Callable[[T], object], what: T) -> torch.Tensor:
    """`memory` as a tensor; `give_back(what)` once its last view is gone.

    That is on any thread. `memory` is a view that nobody else holds.
    """
    weakref.finalize(memory, give_back, what).atexit = False
    return torch.from_numpy(memory)


ROWS = RowMemory(BUDGET)
"""Of this process."""

# SPDX-License-Identifier: Apache-2.0
"""Host memory for captured rows, used again once nobody holds them.

Memory that is new to a process costs several times what copying into it costs: the
system must find and clear each of its pages first. Rows come all the time and go as
soon as their consumer has them, so their memory is kept for the next ones.
"""

import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from math import prod
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import psutil
import torch

from vllm.v1.capture.memory.parallel_copy import copy_all

Bytes: TypeAlias = npt.NDArray[np.uint8]
T = TypeVar("T")

SMALLEST = 128 << 10
"""Bytes below which the allocator keeps memory by itself."""
MOST_KEPT = 4 << 30
"""Bytes that are kept, at most, while nobody holds them; ..."""
SHARE_KEPT = 16
"""... and at most this part of the machine's memory."""


class RowMemory:
    """Gives out tensors, and takes their memory back when the last view is gone.

    Safe to use from any thread. Taking back takes no lock, as it may happen wherever
    the interpreter frees an object.
    """

    def __init__(self, kept: int) -> None:
        """Keep up to `kept` bytes that nobody holds."""
        self._kept = kept
        self._free: defaultdict[int, deque[Bytes]] = defaultdict(deque)
        self._free_bytes = 0
        """Only roughly kept: threads may count at the same time."""
        self._least_free = 0
        """The least of it since `trim`."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of any content, `shape`, on the CPU; nobody else has its memory."""
        num_bytes = prod(shape) * dtype.itemsize
        if num_bytes < SMALLEST:
            return torch.empty(*shape, dtype=dtype)
        size = _rounded(num_bytes)
        try:
            slab = self._free[size].pop()
            self._free_bytes -= size
            self._least_free = min(self._least_free, self._free_bytes)
        except IndexError:
            slab = np.empty(size, dtype=np.uint8)
        # In its shape before it is torch's, whose calls take longer.
        memory = slab[:num_bytes].reshape(*shape[:-1], shape[-1] * dtype.itemsize)
        return lent(memory, self._take_back, slab).view(dtype)

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
        unneeded = self._least_free
        for size in sorted(self._free, reverse=True):
            while size <= unneeded:
                try:
                    self._free[size].popleft()
                except IndexError:
                    break
                self._free_bytes -= size
                unneeded -= size
        self._least_free = self._free_bytes

    def _take_back(self, slab: Bytes) -> None:
        if self._free_bytes + slab.nbytes <= self._kept:
            self._free_bytes += slab.nbytes
            self._free[slab.nbytes].append(slab)


def lent(memory: Bytes, give_back: Callable[[T], object], what: T) -> torch.Tensor:
    """`memory` as a tensor; `give_back(what)` once its last view is gone.

    That is on any thread. `memory` is a view that nobody else holds.
    """
    weakref.finalize(memory, give_back, what).atexit = False
    return torch.from_numpy(memory)


def _rounded(num_bytes: int) -> int:
    """The next size that memory is kept in; at most a quarter more."""
    step = 1 << max(num_bytes.bit_length() - 3, 0)
    return -(-num_bytes // step) * step


def kept_bytes() -> int:
    """How much memory for rows may be kept on this machine."""
    return min(MOST_KEPT, psutil.virtual_memory().total // SHARE_KEPT)


ROWS = RowMemory(kept_bytes())
"""Of this process."""

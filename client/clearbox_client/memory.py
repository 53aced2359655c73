# SPDX-License-Identifier: Apache-2.0
"""Memory for rows, which is used again when nothing refers to them any more.

New memory costs more than the copy of rows into it: the kernel finds and clears each
page, and below a virtual machine so does its host. Here it has huge pages, and is kept.
What is kept unused costs nobody anything: the kernel takes it back when it is short of
memory (`MADV_FREE` in `madvise(2)`).
"""

import mmap
import threading
import weakref
from collections import deque

import numpy as np

SMALLEST = 1 << 20
"""Smaller arrays, in bytes, are NumPy's."""
HUGE_PAGE = 2 << 20
MOST_KEPT = 4 << 30
"""Most bytes that are kept unused."""
KEEPS = hasattr(mmap, "MADV_FREE")
"""Whether the system can take unused memory back; otherwise none is kept."""


class Memory:
    """Lends memory; safe to use from several threads.

    It comes back without a lock, because finalizers run anywhere.
    """

    def __init__(self, most_kept: int = MOST_KEPT) -> None:
        """Start without memory."""
        self._most_kept = most_kept
        self._lock = threading.Lock()
        self._kept: list[mmap.mmap] = []
        """Unused blocks; the last is the one that came back last."""
        self._returned: deque[mmap.mmap] = deque()

    def take(self, size: int) -> memoryview:
        """Memory of `size` bytes with any content, valid as long as a view of it."""
        if size < SMALLEST or not KEEPS:
            return np.empty(size, np.uint8).data
        whole = -(-size // HUGE_PAGE) * HUGE_PAGE
        block = self._kept_block(whole)
        if block is None:
            block = _new_block(whole)
        lent = np.frombuffer(block, np.uint8, size)
        weakref.finalize(lent, self._give_back, block).atexit = False
        return lent.data

    def _kept_block(self, size: int) -> mmap.mmap | None:
        """An unused block that is not much larger than `size`."""
        with self._lock:
            while self._returned:
                self._kept.append(self._returned.popleft())
            fits = [one for one in self._kept if size <= len(one) < 2 * size]
            chosen = min(fits, key=len, default=None)
            if chosen is not None:
                self._kept.remove(chosen)
            while sum(map(len, self._kept)) > self._most_kept:
                del self._kept[0]
        return chosen

    def _give_back(self, block: mmap.mmap) -> None:
        block.madvise(mmap.MADV_FREE)
        self._returned.append(block)


def _new_block(size: int) -> mmap.mmap:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    block = mmap.mmap(-1, size, flags=flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        block.madvise(mmap.MADV_HUGEPAGE)
    return block


MEMORY = Memory()
"""The memory of this process."""

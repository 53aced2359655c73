# SPDX-License-Identifier: Apache-2.0
"""Shared memory segments, which can be found by address.

A segment is an anonymous file (`memfd_create(2)`). It has no name in a file system, so
nothing is left behind however a process ends, and the size of `/dev/shm` does not limit
it.
"""

import ctypes
import mmap
import os
import threading
import weakref
from bisect import bisect_right
from concurrent.futures import ThreadPoolExecutor
from errno import EINVAL
from secrets import randbits

import numpy as np
import numpy.typing as npt

from vllm.utils.math_utils import cdiv
from vllm.v1.residual.machine import copy_threads

ALIGNMENT = mmap.PAGESIZE
"""Bytes; blocks within segments are aligned to this, so that each can be mapped."""
MADV_HUGEPAGE = 14
MADV_POPULATE_WRITE = 23
"""From `madvise(2)`; the mmap module lacks the latter."""
POPULATED = 64 << 20
"""Most bytes that are populated per call, and so by one thread at a time."""


class SharedSegment:
    """A block of shared memory, `[size]` uint8; freed with the last view of it."""

    def __init__(self, size: int) -> None:
        """Allocate `size` bytes, a multiple of `ALIGNMENT`.

        Raises:
            OSError: the system has no more memory or file descriptors.

        """
        assert size % ALIGNMENT == 0, f"{size} bytes are no whole pages"
        self.number = randbits(63)
        """Identifies the segment among those of all processes."""
        self.size = size
        self.file = os.memfd_create("vllm-capture", os.MFD_CLOEXEC)
        """The file descriptor."""
        try:
            os.ftruncate(self.file, size)
            mapped = mmap.mmap(self.file, size)
        except OSError:
            os.close(self.file)
            raise
        self.memory: npt.NDArray[np.uint8] = np.frombuffer(mapped, dtype=np.uint8)
        self.address = self.memory.ctypes.data
        SEGMENTS.add(self)

    def populate(self) -> None:
        """Allocate all pages now, on several threads.

        If a page could not be allocated on a later access, the process would be killed.

        Raises:
            OSError: there is not enough memory.

        """
        libc = ctypes.CDLL(None, use_errno=True)
        advise = libc.madvise
        advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        address, size = self.address, self.size
        advise(address, size, MADV_HUGEPAGE)  # May be unsupported; ignored.
        share = cdiv(cdiv(size, copy_threads()), mmap.PAGESIZE) * mmap.PAGESIZE
        piece = min(share, POPULATED)

        def populate_from(start: int) -> int:
            length = min(piece, size - start)
            failed = advise(address + start, length, MADV_POPULATE_WRITE)
            return ctypes.get_errno() if failed else 0

        # The kernel clears the pages, on the thread that asks for them.
        with ThreadPoolExecutor(copy_threads(), "capture-populate") as pool:
            errors = set(pool.map(populate_from, range(0, size, piece))) - {0}
        if EINVAL in errors:  # Linux before 5.14
            os.posix_fallocate(self.file, 0, size)
        elif errors:
            raise OSError(errors.pop(), "no memory for captured rows")


class Segments:
    """The shared segments of this process, by address; thread-safe.

    Freeing a segment takes no lock, because a finalizer may run anywhere.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[int, weakref.ref[SharedSegment]] = {}
        self._starts: tuple[int, ...] = ()

    def add(self, segment: SharedSegment) -> None:
        """Register a segment, by a weak reference."""
        weakref.finalize(segment, os.close, segment.file)
        with self._lock:
            living = {a: one for a, one in self._found.items() if one() is not None}
            living[segment.address] = weakref.ref(segment)
            self._found, self._starts = living, tuple(sorted(living))

    def numbers(self) -> set[int]:
        """The numbers of the segments that exist."""
        found = [one() for one in list(self._found.values())]
        return {segment.number for segment in found if segment is not None}

    def find(self, address: int, num_bytes: int) -> SharedSegment | None:
        """The segment that contains the range of memory, if there is one."""
        starts, found = self._starts, self._found
        index = bisect_right(starts, address) - 1
        one = found.get(starts[index]) if index >= 0 else None
        segment = None if one is None else one()
        if segment is None or address + num_bytes > segment.address + segment.size:
            return None
        return segment


SEGMENTS = Segments()

# SPDX-License-Identifier: Apache-2.0
"""A first-fit allocator of ranges."""

from bisect import bisect_left


class Extents:
    """The free parts of `[0, size)`, allocated by first fit."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = [(0, size)]
        """`(start, stop)` of each, ascending and not adjacent."""

    @property
    def is_free(self) -> bool:
        """Whether nothing is allocated."""
        return self._free == [(0, self.size)]

    def take(self, size: int) -> int | None:
        """Allocate `size`; returns the start, None if no free part is large enough."""
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

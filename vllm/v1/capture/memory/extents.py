# SPDX-License-Identifier: Apache-2.0
"""Which parts of a piece of memory are free."""

from bisect import bisect_left


class Extents:
    """The free parts of `[0, size)`; the first that suffices is taken from."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = [(0, size)]
        """`(start, stop)` of each, ascending; none touches the next."""

    @property
    def is_free(self) -> bool:
        """Whether nothing is taken."""
        return self._free == [(0, self.size)]

    def take(self, size: int) -> int | None:
        """Where `size` more begin; None if no part suffices."""
        for index, (start, stop) in enumerate(self._free):
            if stop - start >= size:
                rest = [(start + size, stop)] if stop - start > size else []
                self._free[index : index + 1] = rest
                return start
        return None

    def give_back(self, start: int, size: int) -> None:
        """What was taken at `start` is free."""
        stop = start + size
        index = bisect_left(self._free, (start, stop))
        if index < len(self._free) and self._free[index][0] == stop:
            stop = self._free.pop(index)[1]
        if index and self._free[index - 1][1] == start:
            index -= 1
            start = self._free.pop(index)[0]
        self._free.insert(index, (start, stop))

# SPDX-License-Identifier: Apache-2.0
"""A bound on the rows that wait to be written, over all requests of a consumer."""

import threading


class MemoryBudget:
    """Counts bytes; any thread may call."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._held = 0
        self._stalled = False
        self._changed = threading.Condition()

    @property
    def held(self) -> int:
        """Bytes that are counted now."""
        return self._held

    def add(self, size: int) -> None:
        """Count `size` bytes more, whether or not they fit."""
        with self._changed:
            self._held += size

    def release(self, size: int, written: bool = True) -> None:
        """Count `size` bytes less, because they were written or were given up."""
        with self._changed:
            self._held -= size
            self._stalled = self._stalled and not written
            assert self._held >= 0, f"{-self._held} bytes were released twice"
            self._changed.notify_all()

    def wait(self, timeout: float) -> bool:
        """Wait until the bytes fit; False if they still do not.

        Once a wait has been in vain, further ones return at once until something
        is written: a stuck disk must not stop the caller again and again.
        """
        with self._changed:
            if self._held <= self.limit:
                return True
            if self._stalled:
                return False
            fits = self._changed.wait_for(lambda: self._held <= self.limit, timeout)
            self._stalled = not fits
            return fits

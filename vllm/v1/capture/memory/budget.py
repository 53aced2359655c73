# SPDX-License-Identifier: Apache-2.0
"""The budget of a process's host memory for captured rows, accounted by purpose.

When memory runs short, all objects that have lent memory reclaim what was released.
"""

import threading
import weakref
from collections import Counter
from typing import Protocol

from vllm.logger import init_logger
from vllm.v1.residual.machine import HOST_SHARE, memory_bytes

logger = init_logger(__name__)


class HostBudget:
    """Counts the bytes that a process has allocated for rows, by owner; thread-safe.

    An owner is the name of a purpose, such as `"staging"`.
    """

    def __init__(self, limit: int) -> None:
        """Start with nothing allocated, and a limit in bytes."""
        self.limit = limit
        """Maximum bytes of all owners together."""
        self.overflow_bytes = 0
        """Total bytes of rows put in ordinary memory for lack of budget or memory."""
        self._owners: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._has_overflowed = False

    def take(self, owner: str, num_bytes: int) -> bool:
        """Count `num_bytes` for `owner` if they fit; returns whether they do."""
        with self._lock:
            if self._owners.total() + num_bytes > self.limit:
                return False
            self._owners[owner] += num_bytes
            return True

    def fits(self, num_bytes: int) -> bool:
        """Whether `take` would succeed now."""
        return self._owners.total() + num_bytes <= self.limit

    def claim(self, owner: str, num_bytes: int) -> None:
        """Count `num_bytes` for `owner` even if they exceed the limit."""
        with self._lock:
            self._owners[owner] += num_bytes

    def give_back(self, owner: str, num_bytes: int) -> None:
        """Subtract `num_bytes` that `owner` returned to the system."""
        with self._lock:
            self._owners[owner] -= num_bytes

    def overflow(self, num_bytes: int) -> None:
        """Count rows put in ordinary memory, from which they are copied once more."""
        self.overflow_bytes += num_bytes
        if not self._has_overflowed:
            self._has_overflowed = True
            logger.warning(
                "Captured rows need more shared host memory than the limit of %d MiB: "
                "further rows use ordinary memory and are copied between processes. "
                "Raise --capture-host-memory-bytes, or release captured tensors "
                "earlier",
                self.limit >> 20,
            )

    def by_owner(self) -> dict[str, int]:
        """Bytes allocated now, by owner."""
        with self._lock:
            return {name: held for name, held in self._owners.items() if held}


BUDGET = HostBudget(memory_bytes() // HOST_SHARE)
"""The budget of this process."""


class Collector(Protocol):
    """Lends memory, and can find out what was released."""

    def collect(self) -> None:
        """Reclaim released memory without blocking; thread-safe."""
        ...


_collectors: "weakref.WeakSet[Collector]" = weakref.WeakSet()


def collect_from(collector: Collector) -> None:
    """Register `collector`, by a weak reference."""
    _collectors.add(collector)


def collect_all() -> None:
    """Call `collect` on all registered objects."""
    for collector in list(_collectors):
        collector.collect()

# SPDX-License-Identifier: Apache-2.0
"""How much host memory a process may hold for captured rows, and for what it does."""

import threading
from collections import Counter
from functools import cache

import psutil

from vllm.logger import init_logger
from vllm.utils.cpu_resource_utils import get_cgroup_memory_limit

logger = init_logger(__name__)

HOST_SHARE = 4
"""By itself capture takes at most this part of the machine's memory."""


@cache
def machine_bytes() -> int:
    """The memory of the machine in bytes, or of the control group if that is less."""
    total = psutil.virtual_memory().total
    limit = get_cgroup_memory_limit()
    return total if limit is None else min(total, limit)


class HostBudget:
    """Counts what a process takes from the system for rows, by owner.

    Safe to use from any thread.
    """

    def __init__(self, limit: int) -> None:
        """Allow `limit` bytes."""
        self.limit = limit
        """Bytes that all owners may hold together."""
        self.overflow_bytes = 0
        """Bytes of rows, so far, that lay in ordinary memory because the budget or
        shared memory did not suffice."""
        self._owners: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._has_overflowed = False

    def take(self, owner: str, num_bytes: int) -> bool:
        """Count `num_bytes` for `owner`; False, and nothing, where they do not fit."""
        with self._lock:
            if self._owners.total() + num_bytes > self.limit:
                return False
            self._owners[owner] += num_bytes
            return True

    def fits(self, num_bytes: int) -> bool:
        """Whether `take` would count so much now."""
        return self._owners.total() + num_bytes <= self.limit

    def claim(self, owner: str, num_bytes: int) -> None:
        """Count `num_bytes` that are needed in any case."""
        with self._lock:
            self._owners[owner] += num_bytes

    def give_back(self, owner: str, num_bytes: int) -> None:
        """`owner` has returned `num_bytes` to the system."""
        with self._lock:
            self._owners[owner] -= num_bytes

    def overflow(self, num_bytes: int) -> None:
        """Rows of `num_bytes` go to ordinary memory, which is copied once more."""
        self.overflow_bytes += num_bytes
        if not self._has_overflowed:
            self._has_overflowed = True
            logger.warning(
                "Captured rows need more shared host memory than the %d MiB that "
                "there may be: further rows lie in ordinary memory and are copied on "
                "their way. Raise --capture-host-memory-bytes, or let go of captured "
                "tensors earlier",
                self.limit >> 20,
            )

    def by_owner(self) -> dict[str, int]:
        """Bytes that are held now."""
        with self._lock:
            return {name: held for name, held in self._owners.items() if held}


BUDGET = HostBudget(machine_bytes() // HOST_SHARE)
"""Of this process."""

# SPDX-License-Identifier: Apache-2.0
"""Who may hold memory for rows that others have already let go of."""

import weakref
from typing import Protocol


class Collector(Protocol):
    """Takes back what it has lent."""

    def collect(self) -> None:
        """Drop what is not held any more, without waiting; any thread may call."""
        ...


_collectors: "weakref.WeakSet[Collector]" = weakref.WeakSet()


def collect_from(collector: Collector) -> None:
    """Ask `collector`, as long as it exists, whenever memory is wanted."""
    _collectors.add(collector)


def collect_all() -> None:
    """Have all of them take back what they can."""
    for collector in list(_collectors):
        collector.collect()

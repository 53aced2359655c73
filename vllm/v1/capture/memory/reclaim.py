# SPDX-License-Identifier: Apache-2.0
"""A registry of objects that can reclaim memory which others have released."""

import weakref
from typing import Protocol


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

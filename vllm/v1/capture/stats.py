# SPDX-License-Identifier: Apache-2.0
"""What the sinks of a process have done so far, in numbers."""

from collections.abc import Iterable

import msgspec


class LaneCounters(msgspec.Struct):
    """One consumer instance in one process. Rows are rows at one hook point."""

    rows: int = 0
    """Rows that were handed to the consumer."""
    bytes: int = 0
    spilled_rows: int = 0
    """Rows that went over the disk because the consumer was behind."""
    spilled_bytes: int = 0
    rewritten_bytes: int = 0
    """Bytes that the consumer itself spilled, and so writes twice."""
    dropped_rows: int = 0
    """Rows that were dropped because the consumer was behind."""
    failed_rows: int = 0
    """Rows of streams whose result is an error."""
    requests: int = 0
    """Requests whose result was given."""
    queue_depth: int = 0
    """Packets and ends of requests that wait now."""
    queue_bytes: int = 0
    """Bytes of rows that wait in memory now."""
    spill_bytes: int = 0
    """Bytes of rows that wait on disk now."""


class MemoryCounters(msgspec.Struct):
    """What a worker holds for rows in host memory, and how rows have left it."""

    budget_bytes: int = 0
    """What it may hold."""
    owners: dict[str, int] = msgspec.field(default_factory=dict)
    """Bytes that are taken from the system now, by what for."""
    overflow_bytes: int = 0
    """Bytes of rows, so far, that went to ordinary memory as the budget was used up."""
    lent_bytes: int = 0
    """Bytes of rows, so far, that front ends got without a copy; ..."""
    copied_bytes: int = 0
    """... and over a socket."""
    held_by_front_ends_bytes: int = 0
    """Of the owners' bytes, what front ends have not given back."""
    leases: int = 0
    """The blocks of memory that these are."""

    @property
    def held_bytes(self) -> int:
        """All owners' bytes."""
        return sum(self.owners.values())


TOTALS = (
    "rows",
    "bytes",
    "spilled_rows",
    "spilled_bytes",
    "rewritten_bytes",
    "dropped_rows",
    "failed_rows",
    "requests",
)
"""Fields that only grow."""

LEVELS = ("queue_depth", "queue_bytes", "spill_bytes")
"""Fields that are states of now."""


def added(counters: Iterable[LaneCounters]) -> LaneCounters:
    """The sum over several processes."""
    found = list(counters)
    return LaneCounters(
        **{
            name: sum(getattr(each, name) for each in found)
            for name in (*TOTALS, *LEVELS)
        }
    )

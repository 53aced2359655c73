# SPDX-License-Identifier: Apache-2.0
"""Counters of delivery and of host memory, which workers report to front ends."""

from collections.abc import Iterable

import msgspec


class LaneCounters(msgspec.Struct):
    """Counters of one consumer instance in one process.

    A row is one token at one tap. The last three fields are current values, the others
    totals since the start.
    """

    rows: int = 0
    """Rows submitted to the consumer."""
    bytes: int = 0
    """Bytes of these rows."""
    spilled_rows: int = 0
    """Rows that were spilled to disk because the consumer was too slow."""
    spilled_bytes: int = 0
    """Bytes of these rows."""
    rewritten_bytes: int = 0
    """Bytes that the consumer itself spilled, and therefore wrote twice."""
    dropped_rows: int = 0
    """Rows that were dropped because the consumer was too slow."""
    failed_rows: int = 0
    """Rows of keys whose result is an error."""
    requests: int = 0
    """Requests for which the consumer has returned a result."""
    queue_depth: int = 0
    """Packets and ends of requests in the queue."""
    queue_bytes: int = 0
    """Bytes of rows queued in memory."""
    spill_bytes: int = 0
    """Bytes of rows queued on disk."""


class MemoryCounters(msgspec.Struct):
    """Host memory that a worker holds for rows, and the rows sent from it."""

    budget_bytes: int = 0
    """Limit on the memory that it may hold."""
    owners: dict[str, int] = msgspec.field(default_factory=dict)
    """Bytes allocated now, by purpose."""
    overflow_bytes: int = 0
    """Total bytes of rows put in pageable memory because the budget was used up."""
    lent_bytes: int = 0
    """Total bytes of rows passed to front ends in shared memory, without a copy."""
    copied_bytes: int = 0
    """Total bytes of rows sent to front ends over a socket."""
    held_by_front_ends_bytes: int = 0
    """The part of the allocated bytes that front ends have not returned."""
    leases: int = 0
    """Number of memory blocks that front ends have not returned."""

    @property
    def held_bytes(self) -> int:
        """Bytes allocated now, for all purposes."""
        return sum(self.owners.values())


LEVELS = ("queue_depth", "queue_bytes", "spill_bytes")
"""Fields of `LaneCounters` that are current values."""

TOTALS = tuple(n for n in LaneCounters.__struct_fields__ if n not in LEVELS)
"""Fields of `LaneCounters` that only grow."""


def added(counters: Iterable[LaneCounters]) -> LaneCounters:
    """Field-wise sum, for instances in several processes."""
    found = list(counters)
    names = LaneCounters.__struct_fields__
    return LaneCounters(*[sum(getattr(each, n) for each in found) for n in names])

# SPDX-License-Identifier: Apache-2.0
"""How many bytes of rows the requests under way will bring back to their front end.

Rows that return with a request's output lie in the front end's memory until the
client has them, so all requests together are bounded, not just each of them.
"""

import weakref
from collections.abc import Mapping
from typing import Any

from vllm.v1.capture.plan import LIVE, CapturePlan, overlap


class HeldRows:
    """The bounds of the consumers that return rows, and what counts towards them."""

    def __init__(self, consumers: Mapping[str, Any], row_bytes: int) -> None:
        self._row_bytes = row_bytes
        self.limits: dict[str, int] = {
            name: consumer.max_inflight_bytes
            for name, consumer in consumers.items()
            if getattr(consumer, "max_inflight_bytes", None) is not None
        }

    def bytes_of(self, plan: CapturePlan, max_tokens: int | None) -> dict[str, int]:
        """Bytes that a request may return at most, per instance that has a limit."""
        stop = plan.num_prompt_tokens + max((max_tokens or 1) - 1, 0)
        sizes: dict[str, int] = {}
        for group in plan.groups:
            for reader in group.readers:
                if reader.instance in self.limits:
                    rows = sum(b - a for a, b in overlap(reader.ranges, 0, stop))
                    size = rows * len(group.taps) * self._row_bytes * plan.num_samples
                    sizes[reader.instance] = sizes.get(reader.instance, 0) + size
        if LIVE in plan.lanes:
            # The rows that outputs carry before the last lie beside the result.
            sizes = {name: 2 * size for name, size in sizes.items()}
        return sizes


class Reservations:
    """Bytes of requests that were admitted and are not under way yet.

    Prompts are read on several threads, so requests may be admitted between
    another's admission and its start.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, Mapping[str, int]] = {}

    def put(self, plan: CapturePlan, sizes: Mapping[str, int]) -> None:
        """Reserve until `take`, or until the plan is dropped with its request."""
        self._sizes[id(plan)] = sizes
        dropped = weakref.finalize(plan, self._sizes.pop, id(plan), None)
        dropped.atexit = False

    def take(self, plan: CapturePlan) -> None:
        """The request is under way and counts by itself."""
        self._sizes.pop(id(plan), None)

    def bytes_for(self, instance: str) -> int:
        """What is reserved at an instance."""
        return sum(sizes.get(instance, 0) for sizes in list(self._sizes.values()))

# SPDX-License-Identifier: Apache-2.0
"""Delivers each selected row exactly once and in order, whatever is recomputed.

A step may compute rows that become invalid: of a rejected draft token, of a token past
the end of the request, or of a position that is recomputed after a preemption. The
ledger of a group of taps holds rows back until they are known to be valid, drops
superseded ones, and skips positions that it has returned before.
"""

from collections import deque
from typing import NamedTuple

import torch


class Rows(NamedTuple):
    """Rows at consecutive positions, at all taps of a group.

    A tuple, because several are created per request and step, and a dataclass takes
    three times as long.
    """

    start: int
    """Token position of the first row."""
    num_rows: int
    memory: torch.Tensor  # [taps, capacity, hidden_size], on the CPU
    first: int
    """Index of the first row in `memory`."""
    step: int
    """The engine step that computed the last row."""

    @classmethod
    def of(cls, start: int, tensor: torch.Tensor, step: int) -> "Rows":
        """All of `tensor`, `[taps, num_rows, hidden_size]`."""
        return cls(start, tensor.shape[1], tensor, 0, step)

    @property
    def stop(self) -> int:
        """The position after that of the last row."""
        return self.start + self.num_rows

    @property
    def tensor(self) -> torch.Tensor:  # [taps, num_rows, hidden_size]
        """The rows, as a view of `memory`."""
        return self.memory.narrow(1, self.first, self.num_rows)

    def between(self, start: int, stop: int) -> "Rows | None":
        """The rows at positions `[start, stop)`; None if there are none."""
        start, stop = max(start, self.start), min(stop, self.stop)
        if start >= stop:
            return None
        if stop - start == self.num_rows:
            return self
        first = self.first + start - self.start
        return Rows(start, stop - start, self.memory, first, self.step)

    def adjoins(self, before: "Rows") -> bool:
        """Whether the rows directly follow those of `before` in the same memory."""
        return (
            self.memory is before.memory
            and self.first == before.first + before.num_rows
        )


class RowLedger:
    """The unsettled rows of one request at one group of taps."""

    def __init__(self) -> None:
        self._pending: deque[Rows] = deque()
        self._handed_on = 0
        """Every selected row below this position was returned."""

    def add(self, rows: Rows) -> list[Rows]:
        """Add rows of a step, and return the earlier rows that they settle.

        A step that computes position p shows that the tokens before p are final, and
        that rows of earlier steps at p and after are invalid. It does not settle its
        own rows, which may be added in several parts.
        """
        settled: list[Rows] = []
        if not self._pending or self._pending[-1].step != rows.step:
            settled = self._take_below(rows.start)
            self._pending.clear()
        fresh = rows.between(self._handed_on, rows.stop)
        if fresh is not None:
            self._pending.append(fresh)
        return settled

    def finish(self, stop: int) -> list[Rows]:
        """Return the remaining rows of a request whose last row is at `stop - 1`."""
        settled = self._take_below(stop)
        self._pending.clear()
        return settled

    def _take_below(self, stop: int) -> list[Rows]:
        taken = []
        for rows in self._pending:
            part = rows.between(self._handed_on, stop)
            if part is not None:
                taken.append(part)
                self._handed_on = part.stop
        return taken

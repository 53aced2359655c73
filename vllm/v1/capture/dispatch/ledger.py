# SPDX-License-Identifier: Apache-2.0
"""Each selected row once, in ascending order, whatever the engine recomputes.

A step computes rows that may turn out not to count: a draft token that is
rejected, a token past the one that ends the request, a position that is
computed again after a preemption. The ledger of one group of taps holds rows
back until that is settled, drops what was superseded, and skips what was
handed on before.
"""

from collections import deque
from typing import NamedTuple

import torch


class Rows(NamedTuple):
    """Rows at consecutive positions, at all taps of a group.

    Some come into being per request and step: a tuple takes a third of the time.
    """

    start: int
    """Token position of the first row."""
    num_rows: int
    memory: torch.Tensor  # [taps, capacity, hidden_size], on the CPU
    first: int
    """Where the first row is in the memory."""
    step: int
    """The engine step that computed the last row."""

    @classmethod
    def of(cls, start: int, tensor: torch.Tensor, step: int) -> "Rows":
        """All of `tensor`, `[taps, num_rows, hidden_size]`."""
        return cls(start, tensor.shape[1], tensor, 0, step)

    @property
    def stop(self) -> int:
        """The position after the last row's."""
        return self.start + self.num_rows

    @property
    def tensor(self) -> torch.Tensor:  # [taps, num_rows, hidden_size]
        """The rows themselves."""
        return self.memory.narrow(1, self.first, self.num_rows)

    def between(self, start: int, stop: int) -> "Rows | None":
        """The part at positions `[start, stop)`, None where there is none."""
        start, stop = max(start, self.start), min(stop, self.stop)
        if start >= stop:
            return None
        if stop - start == self.num_rows:
            return self
        first = self.first + start - self.start
        return Rows(start, stop - start, self.memory, first, self.step)

    def adjoins(self, before: "Rows") -> bool:
        """Whether the rows lie right behind those of `before` in the same memory."""
        return (
            self.memory is before.memory
            and self.first == before.first + before.num_rows
        )


class RowLedger:
    """The rows of one request at one group of taps, on their way to consumers."""

    def __init__(self) -> None:
        self._pending: deque[Rows] = deque()
        self._handed_on = 0
        """Every row below this position was handed on, or is not selected."""

    def add(self, rows: Rows) -> list[Rows]:
        """Take rows of a step; returns those that have become settled by them.

        A step that computes position p proves that the tokens before p stand,
        and that whatever earlier steps computed at p and after is void. It proves
        nothing of its own rows: one step's rows may come in several parts.
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
        """The remaining rows of a request whose last row is at `stop - 1`."""
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

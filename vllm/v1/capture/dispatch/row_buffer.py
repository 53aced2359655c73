# SPDX-License-Identifier: Apache-2.0
"""Memory of a request's rows after they leave staging memory.

A decoding request has one row in each step. As long as its row index stays the same,
these rows lie at a constant stride on the host and are described by one `Piece`: the
cost per request is that per piece, not per row.

Rows of generated tokens arrive one at a time and are delivered together at the end.
They are placed consecutively from the start, so that they need not be joined later.

A step may compute rows that become invalid: of a rejected draft token, of a token past
the end of the request, or of a position that is recomputed after a preemption. The
ledger of a group of taps holds rows back until they are known to be valid, drops
superseded ones, and skips positions that it has returned before.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from vllm.v1.capture.memory.buffer_pool import ROWS, RowCopy


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
    step_before: int | None = None
    """The step of the row before it, if each row is of a step of its own."""

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
        first, step = self.first + start - self.start, self.step
        if self.step_before is not None and stop < self.stop:
            step = self.step_before
        return Rows(start, stop - start, self.memory, first, step, self.step_before)


class RowLedger:
    """The unsettled rows of one request at one group of taps.

    Each selected row is delivered exactly once and in order, whatever is recomputed.
    """

    def __init__(self) -> None:
        self._pending: deque[Rows] = deque()
        self._handed_on = 0
        """Every selected row below this position was returned."""

    def add(self, rows: Rows) -> list[Rows]:
        """Add rows of a step, and return the earlier rows that they settle.

        A step that computes position p shows that the tokens before p are final, and
        that rows of earlier steps at p and after are invalid. It does not settle its
        own rows, which may be added in several parts. Of rows that are each of a step
        of their own, the last one settles the others.
        """
        settled: list[Rows] = []
        if not self._pending or self._pending[-1].step != rows.step:
            settled = self._take_below(rows.start)
            self._pending.clear()
        fresh = rows.between(self._handed_on, rows.stop)
        if fresh is not None:
            self._pending.append(fresh)
            if rows.step_before is not None:
                settled += self._take_below(rows.stop - 1)
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


class Piece(NamedTuple):
    """Rows of one request and group at consecutive positions, of one or more steps.

    If the steps are several, each has one row.
    """

    start: int
    """Token position of the first row."""
    num_rows: int
    num_steps: int
    step: int
    """The engine step that computed the last row."""
    memory: torch.Tensor  # [rows, hidden_size], the host ring
    first: int
    """Index in `memory` of the first row at the first tap."""
    tap_stride: int
    """Rows of `memory` between taps."""
    row_stride: int
    """Rows of `memory` between rows."""
    width: int
    """Values per row."""
    page: tuple[torch.Tensor, int] | None = None
    """A page `[taps, rows, hidden_size]` and the index of the first row in it.

    None if the rows are in the host ring.
    """
    step_before: int | None = None
    """The step of the row before the last one, if there are several steps."""

    def continues(self, before: "Piece") -> bool:
        """Whether both have one row per step, and this one continues `before`."""
        return (
            self.start == before.start + before.num_rows
            and self.num_rows == self.num_steps
            and before.num_rows == before.num_steps
            and self.step != before.step
            and self.page is before.page is None
        )

    def copy_to(self, memory: torch.Tensor, place: int) -> RowCopy:
        """The copy of the rows to `memory` `[taps, capacity, hidden_size]`.

        `place` is the index of the first row there.
        """
        width = self.memory.shape[1]
        return RowCopy(
            memory,
            place,
            self.memory,
            self.first * width,
            self.num_rows,
            self.tap_stride * width,
            self.row_stride * width,
        )


GATHERED = 256
"""Capacity, in rows, of memory for rows that arrive a few at a time."""


class RowBuffer:
    """The memory for the rows of one group of a request."""

    def __init__(self, num_taps: int, dtype: torch.dtype, together: bool) -> None:
        """Start without memory.

        Args:
            num_taps: taps of the group.
            dtype: of the rows.
            together: whether rows of several steps may share memory. They should not
                if rows are delivered after each step, because a consumer that keeps
                one of them would keep all.

        """
        self._num_taps = num_taps
        self._dtype = dtype
        self._together = together
        self._memory: torch.Tensor | None = None
        self._used = 0

    def gather(
        self, pieces: Sequence[Piece], end: int, copies: list[RowCopy]
    ) -> Iterator[Rows]:
        """Place the rows of pieces; yields them in order, for the ledger.

        Args:
            pieces: of this group.
            end: upper bound of the request's positions.
            copies: extended by the copies to do before the rows are read.

        """
        for stretch in stretches(pieces):
            first, last = stretch[0], stretch[-1]
            num_rows = sum([piece.num_rows for piece in stretch])
            if first.page is None:
                most = max(num_rows, min(end - first.start, GATHERED))
                memory, place = self.room_for(num_rows, most, first.width)
                at = place
                for piece in stretch:
                    copies.append(piece.copy_to(memory, at))
                    at += piece.num_rows
            else:
                memory, place = first.page
            before = None
            if num_rows > 1 and last.num_rows == last.num_steps:
                before = last.step_before
                if before is None:
                    before = stretch[-2].step
            yield Rows(first.start, num_rows, memory, place, last.step, before)

    def room_for(
        self, num_rows: int, most: int, width: int
    ) -> tuple[torch.Tensor, int]:
        """Memory with room, and the index of the first free row in it.

        New memory has room for `most` rows, those that will follow among them.
        """
        memory, place = self._memory, self._used
        if memory is None or not self._together or place + num_rows > memory.shape[1]:
            shape = self._num_taps, most if self._together else num_rows, width
            memory, place = ROWS.empty(shape, self._dtype), 0
        self._memory, self._used = memory, place + num_rows
        return memory, place


def stretches(pieces: Sequence[Piece]) -> Iterator[Sequence[Piece]]:
    """The pieces in order, grouped into those that continue each other."""
    stretch: list[Piece] = []
    for piece in pieces:
        if stretch and not piece.continues(stretch[-1]):
            yield stretch
            stretch = []
        stretch.append(piece)
    if stretch:
        yield stretch

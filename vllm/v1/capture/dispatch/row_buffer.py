# SPDX-License-Identifier: Apache-2.0
"""Where a request's rows are put when they leave staging memory.

Rows of generated tokens come one at a time and are handed on together at the end, so
they are put one behind the other at once: nothing has to be joined later.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from vllm.v1.capture.dispatch.ledger import Rows
from vllm.v1.capture.dispatch.row_spans import Piece
from vllm.v1.capture.memory.buffer_pool import ROWS
from vllm.v1.capture.memory.row_copy import RowCopy

GATHERED = 256
"""Rows of a group that lie together, if they come a few at a time."""


class Run(NamedTuple):
    """Rows of steps of one row each, one behind the other in memory."""

    start: int
    num_rows: int
    memory: torch.Tensor  # [taps, capacity, hidden_size]
    first: int
    step_before: int
    """The step of the last row but one, if there are several."""
    step: int

    def goes_on(self, before: "Run") -> bool:
        """Whether these are the next positions, in the same memory."""
        return (
            self.start == before.start + before.num_rows
            and self.memory is before.memory
            and self.first == before.first + before.num_rows
            and self.step != before.step
        )

    def after(self, before: "Run") -> "Run":
        """Both, where this one goes on."""
        return Run(
            before.start,
            before.num_rows + self.num_rows,
            self.memory,
            before.first,
            self.step_before if self.num_rows > 1 else before.step,
            self.step,
        )

    def rows(self) -> Iterator[Rows]:
        """As the ledger takes them: a step's row settles those before."""
        start, num_rows, memory, first, step_before, step = self
        if num_rows > 1:
            yield Rows(start, num_rows - 1, memory, first, step_before)
        yield Rows(start + num_rows - 1, 1, memory, first + num_rows - 1, step)


class RowBuffer:
    """The memory of one group's rows."""

    def __init__(self, num_taps: int, dtype: torch.dtype, together: bool) -> None:
        """`together`: whether rows of several steps may share memory.

        Not where each step's rows leave at once: who keeps some would keep all.
        """
        self._num_taps = num_taps
        self._dtype = dtype
        self._together = together
        self._memory: torch.Tensor | None = None
        self._used = 0
        self._run: Run | None = None
        """What is in memory and was not given out, as more of it may come."""
        self._after_prompt = False
        """Whether what was given out last waits for a row behind it."""

    def gather(
        self, pieces: Sequence[Piece], end: int, copies: list[RowCopy]
    ) -> Iterator[Rows]:
        """The rows of pieces, in order, as the ledger takes them.

        What leaves only at the end may be kept here until `rest`.

        Args:
            pieces: of this group.
            end: the request has no position from here on.
            copies: gets what is to be copied, before anyone reads the rows.

        """
        for stretch in stretches(pieces):
            first = stretch[0]
            if first.page is not None:
                memory, place = first.page
                yield from self.rest()
                yield Rows(first.start, first.num_rows, memory, place, first.step)
                self._after_prompt = True
                continue
            memory, place, num_rows = self._place(stretch, end - first.start, copies)
            last = stretch[-1]
            if last.num_rows > last.num_steps:
                yield from self.rest()
                yield Rows(first.start, num_rows, memory, place, last.step)
                self._after_prompt = True
                continue
            before = last.step_before if last.num_steps > 1 else stretch[-2:][0].step
            run = Run(first.start, num_rows, memory, place, before, last.step)
            if self._run is not None and run.goes_on(self._run):
                run = run.after(self._run)
            else:
                yield from self.rest()
            self._run = run
            if self._after_prompt or not self._together:
                self._after_prompt = False
                yield from self.rest()

    def rest(self) -> Iterator[Rows]:
        """What was kept; nothing goes on from it."""
        run, self._run = self._run, None
        if run is not None:
            yield from run.rows()

    def _place(
        self, stretch: Sequence[Piece], most: int, copies: list[RowCopy]
    ) -> tuple[torch.Tensor, int, int]:
        """Where the rows of a stretch go: memory, place in it, how many there are."""
        num_rows = sum([piece.num_rows for piece in stretch])
        memory, place = self._room_for(num_rows, most, stretch[0].width)
        end = place
        for piece in stretch:
            copies.append(piece.copy_to(memory, end))
            end += piece.num_rows
        return memory, place, num_rows

    def _room_for(
        self, num_rows: int, most: int, width: int
    ) -> tuple[torch.Tensor, int]:
        """Memory, and where in it there is room; new memory if there is none."""
        memory, place = self._memory, self._used
        if memory is None or not self._together or place + num_rows > memory.shape[1]:
            capacity = (
                max(num_rows, min(most, GATHERED)) if self._together else num_rows
            )
            shape = self._num_taps, capacity, width
            memory, place = ROWS.empty(shape, self._dtype), 0
        self._memory, self._used = memory, place + num_rows
        return memory, place


def stretches(pieces: Sequence[Piece]) -> Iterator[Sequence[Piece]]:
    """The pieces in order, with those together that go on from each other."""
    stretch: list[Piece] = []
    for piece in pieces:
        if stretch and not piece.goes_on(stretch[-1]):
            yield stretch
            stretch = []
        stretch.append(piece)
    if stretch:
        yield stretch


def joined(parts: list[Rows]) -> torch.Tensor:
    """The rows of `parts`, `[taps, rows, width]`; copied only if they lie apart."""
    pieces: list[Rows] = []
    for part in parts:
        if pieces and part.adjoins(pieces[-1]):
            last = pieces.pop()
            rows = last.num_rows + part.num_rows
            part = Rows(last.start, rows, last.memory, last.first, part.step)
        pieces.append(part)
    return ROWS.cat([piece.tensor for piece in pieces], dim=1)

# SPDX-License-Identifier: Apache-2.0
"""Where a request's rows are put when they leave staging memory.

Rows of generated tokens come one at a time and are handed on together at the end, so
they are put one behind the other at once: nothing has to be joined later.
"""

from collections.abc import Iterator, Sequence

import torch

from vllm.v1.capture.copying import Copy
from vllm.v1.capture.ledger import Rows
from vllm.v1.capture.pieces import Piece
from vllm.v1.capture.recycling import ROWS

GATHERED = 256
"""Rows of a group that lie together, if they come a few at a time."""


class Gathering:
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

    def gather(
        self, pieces: Sequence[Piece], end: int, copies: list[Copy]
    ) -> Iterator[Rows]:
        """The rows of pieces, in order, as the ledger takes them.

        Args:
            pieces: of this group.
            end: the request has no position from here on.
            copies: gets what is to be copied, before anyone reads the rows.

        """
        for stretch in stretches(pieces):
            first = stretch[0]
            if first.page is not None:
                memory, place = first.page
                yield Rows(first.start, first.num_rows, memory, place, first.step)
            else:
                yield from self._place(stretch, end - first.start, copies)

    def _place(
        self, stretch: Sequence[Piece], most: int, copies: list[Copy]
    ) -> Iterator[Rows]:
        counts = [piece.num_rows for piece in stretch]
        num_rows, staged = sum(counts), [piece.staged for piece in stretch]
        memory, place = self._room_for(num_rows, most, staged[0].shape[2])
        start, last = stretch[0].start, stretch[-1]
        targets = memory[:, place : place + num_rows]
        copies.extend(
            zip(targets.split_with_sizes(counts, 1), staged)
            if len(counts) > 1
            else [(targets, staged[0])]
        )
        before = last.step_before if last.num_steps > 1 else stretch[-2:][0].step
        if before == last.step:
            yield Rows(start, num_rows, memory, place, last.step)
            return
        # A step's rows settle those before; each of several steps has one row.
        yield Rows(start, num_rows - 1, memory, place, before)
        after = start + num_rows - 1, 1, memory, place + num_rows - 1, last.step
        yield Rows(*after)

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

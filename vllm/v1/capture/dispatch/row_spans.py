# SPDX-License-Identifier: Apache-2.0
"""Where a request's rows of several steps lie on the host: at equal distances, mostly.

While a request decodes, each step has one row of it, and as long as its place among
the others stays, each row lies as far behind the last one. Such rows are one piece,
however many they are; what is done for a request is done once for each piece.
"""

from typing import NamedTuple

import torch

from vllm.v1.capture.memory.row_copy import RowCopy


class Span(NamedTuple):
    """Steps with one layout on the host, each right behind the one before."""

    num_steps: int
    step: int
    """The last one's number; ..."""
    step_before: int
    """... and that of the one before it, if there is one."""
    memory: torch.Tensor  # [rows, hidden_size]
    num_rows: int
    """Of all requests, at all taps, in one step."""


class Piece:
    """Rows of one request and group at consecutive positions, of a step or of many."""

    __slots__ = (
        "_apart",
        "_distance",
        "_first",
        "_memory",
        "_taps",
        "num_rows",
        "num_steps",
        "page",
        "start",
        "step",
        "step_before",
    )

    def __init__(
        self, span: Span, start: int, num_rows: int, first: int, apart: int, taps: int
    ) -> None:
        """Begin with what a span has of it.

        Args:
            span: its steps; if there are several, each has one row.
            start: token position of the first row.
            num_rows: of each step.
            first: where in the memory the first row is, at the first tap.
            apart: from each tap to the next, in rows.
            taps: how many.

        """
        self.start = start
        """Token position of the first row."""
        self.num_rows = num_rows * span.num_steps
        self.num_steps = span.num_steps
        """If there are several, each has one row."""
        self.step = span.step
        """The engine step that computed the last row; ..."""
        self.step_before = span.step_before
        """... and the one before it, if there are several."""
        self.page: tuple[torch.Tensor, int] | None = None
        """`[taps, rows, hidden_size]` and where in it the rows are, if a request may
        keep that."""
        self._memory = span.memory
        self._first = first
        self._distance = span.num_rows
        self._apart = apart
        self._taps = taps

    def goes_on(self, before: "Piece") -> bool:
        """Whether both are of steps with one row each, and follow each other."""
        return (
            self.start == before.start + before.num_rows
            and self.num_rows == self.num_steps
            and before.num_rows == before.num_steps
            and self.step != before.step
            and self.page is before.page is None
        )

    def copy_to(self, memory: torch.Tensor, place: int) -> RowCopy:
        """What puts the rows into `[taps, capacity, hidden_size]`, from a place on."""
        distance = 1 if self.num_steps == 1 else self._distance
        return RowCopy(
            memory,
            place,
            self._memory,
            self._first,
            self.num_rows,
            self._apart,
            distance,
        )

    @property
    def width(self) -> int:
        """Values of a row."""
        return self._memory.shape[1]

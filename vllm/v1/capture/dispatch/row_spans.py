# SPDX-License-Identifier: Apache-2.0
"""Descriptions of a request's rows on the host, over many steps with a stride.

A decoding request has one row in each step. As long as its row index stays the same,
these rows lie at a constant stride and are described by one `Piece`. The cost per
request is that per piece, not per row.
"""

from typing import NamedTuple

import torch

from vllm.v1.capture.memory.row_copy import RowCopy


class Span(NamedTuple):
    """Consecutive steps with the same layout, adjacent on the host."""

    num_steps: int
    step: int
    """Number of the last step."""
    step_before: int
    """Number of the second to last step, if there is one."""
    memory: torch.Tensor  # [rows, hidden_size]
    num_rows: int
    """Rows of one step, of all requests at all taps."""


class Piece:
    """Rows of one request and group at consecutive positions, of one or more steps."""

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
        """Describe the rows that a request has in a span.

        Args:
            span: the steps; if there are several, each has one row of the request.
            start: token position of the first row.
            num_rows: rows per step.
            first: index of the first row at the first tap in the span's memory.
            apart: distance between taps, in rows.
            taps: number of taps.

        """
        self.start = start
        """Token position of the first row."""
        self.num_rows = num_rows * span.num_steps
        self.num_steps = span.num_steps
        """If there are several, each has one row."""
        self.step = span.step
        """The engine step that computed the last row."""
        self.step_before = span.step_before
        """The step before it, if there are several."""
        self.page: tuple[torch.Tensor, int] | None = None
        """A page `[taps, rows, hidden_size]` and the index of the first row in it.

        None if the rows are in the host ring.
        """
        self._memory = span.memory
        self._first = first
        self._distance = span.num_rows
        self._apart = apart
        self._taps = taps

    def goes_on(self, before: "Piece") -> bool:
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
        """Values per row."""
        return self._memory.shape[1]

# SPDX-License-Identifier: Apache-2.0
"""Where a request's rows are put when they leave staging memory.

Rows of generated tokens come one at a time and are handed on together at the end, so
they are put one behind the other at once: nothing has to be joined later.
"""

from typing import TypeAlias

import numpy as np
import torch

from vllm.v1.capture.copying import Bytes, bytes_of
from vllm.v1.capture.ledger import Rows
from vllm.v1.capture.recycling import ROWS

GATHERED = 256
"""Rows of a group that lie together, if they come a few at a time."""

Shape: TypeAlias = tuple[int, int, int, int]
Placed: TypeAlias = tuple[Rows, Bytes]
"""Rows that a request may keep, and their memory, still to be written."""


class Gathering:
    """The memory of one group's rows."""

    def __init__(self, num_taps: int, dtype: torch.dtype, together: bool) -> None:
        """`together`: whether rows of several steps may share memory.

        Not where each step's rows leave at once: who keeps some would keep all.
        """
        self._num_taps = num_taps
        self._dtype = dtype
        self._together = together
        self._memory = torch.empty(num_taps, 0, 0, dtype=dtype)
        self._bytes: Bytes = np.empty((num_taps, 0, 0), dtype=np.uint8)
        self._used = 0

    def place(self, start: int, shape: Shape, step: int, most: int) -> Placed:
        """Where staged rows are to be copied, next to others of the request.

        Args:
            start: position of the first.
            shape: of what is staged: `(taps, steps, rows of a step, bytes of a row)`.
            step: the step that computed the last of them.
            most: how many rows the request may still have, with these.

        """
        num_rows = shape[1] * shape[2]
        first, stop = self._used, self._used + num_rows
        if not self._together or stop > self._memory.shape[1]:
            capacity = num_rows
            if self._together:
                capacity = max(num_rows, min(most, GATHERED))
            self._renew(capacity, shape[3])
            first, stop = 0, num_rows
        self._used = stop
        rows = Rows(start, num_rows, self._memory, first, step)
        return rows, self._bytes[:, first:stop].reshape(shape)

    def _renew(self, num_rows: int, row_bytes: int) -> None:
        shape = self._num_taps, num_rows, row_bytes // self._dtype.itemsize
        self._memory = ROWS.empty(shape, self._dtype)
        self._bytes = bytes_of(self._memory)


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

# SPDX-License-Identifier: Apache-2.0
"""Where a request's rows are put when they leave staging memory.

Rows of generated tokens come one at a time and are handed on together at the end, so
they are put one behind the other at once: nothing has to be joined later.
"""

import numpy as np
import torch

from vllm.v1.capture.copying import Bytes, bytes_of, copy_rows
from vllm.v1.capture.ledger import Rows
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
        self._memory = torch.empty(num_taps, 0, 0, dtype=dtype)
        self._bytes: Bytes = np.empty((num_taps, 0, 0), dtype=np.uint8)
        self._used = 0

    def put(self, start: int, staged: Bytes, step: int, most: int) -> Rows:
        """Copy staged rows, which lie where others will soon.

        Args:
            start: position of the first.
            staged: `[taps, steps, rows of a step, bytes of a row]`.
            step: the step that computed the last of them.
            most: how many rows the request may still have, with these.

        """
        steps, rows_of_one, row_bytes = staged.shape[1:]
        num_rows = steps * rows_of_one
        first, stop = self._used, self._used + num_rows
        if not self._together or stop > self._memory.shape[1]:
            capacity = num_rows
            if self._together:
                capacity = max(num_rows, min(most, GATHERED))
            self._renew(capacity, row_bytes)
            first, stop = 0, num_rows
        self._used = stop
        copy_rows(self._bytes[:, first:stop].reshape(staged.shape), staged)
        return Rows(start, num_rows, self._memory, first, step)

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

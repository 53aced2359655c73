# SPDX-License-Identifier: Apache-2.0
"""A file that Arrow's IPC writer writes to, with rows that come from elsewhere.

The writer needs the values of a batch as one buffer. Rows of several keys are in
several places, and copying them together would take longer than writing them. The
batch therefore has a placeholder for its values, and the rows are written in its place.
"""

import mmap
import os
from collections.abc import Sequence
from functools import cache

import pyarrow as pa
import torch

from vllm.v1.capture.delivery.row_bytes import raw_bytes, write_all
from vllm.v1.residual.native import Bytes

MOST_BYTES = 64 << 20
"""Maximum bytes of values in a batch, unless a single row has more."""
_WRITE_BYTES = 1 << 30


class RowFile:
    """A file object for `pyarrow.PythonFile`; closes its descriptor."""

    def __init__(self, file: int) -> None:
        """Write to the descriptor `file` from its beginning."""
        self._file = file
        self._end = 0
        self._waiting: list[Bytes] = []
        """Written by Arrow, but not to the file yet."""
        self._rows: list[Bytes] = []
        self._placeholder: pa.Buffer | None = None
        self.closed = False

    def placeholder(self, blocks: Sequence[torch.Tensor]) -> pa.Buffer:
        """The buffer for the values of the next batch.

        Args:
            blocks: the rows `[rows, hidden_size]` to write in its place, in order.

        """
        self._rows = [raw_bytes(block) for block in blocks]
        size = sum(map(len, self._rows))
        self._placeholder = pa.py_buffer(_zeros(max(size, MOST_BYTES))).slice(0, size)
        return self._placeholder

    def write(self, data: Bytes | pa.Buffer) -> int:
        """Called by Arrow: with its own bytes, or with a buffer of the batch.

        Raises:
            OSError: the write failed.

        """
        size = len(data)
        place = self._placeholder
        if (
            place is not None
            and isinstance(data, pa.Buffer)
            and (data.address, data.size) == (place.address, place.size)
        ):
            self._waiting += self._rows
            self._rows, self._placeholder = [], None
            self.flush()
        else:
            self._waiting.append(memoryview(data))
        return size

    def flush(self) -> None:
        """Write what waits with few system calls, each of which releases the GIL."""
        waiting, self._waiting = self._waiting, []
        self._end += write_all(self._file, waiting, _WRITE_BYTES, self._end)

    def close(self) -> None:
        """Write the rest, and close the file."""
        if not self.closed:
            self.closed = True
            try:
                self.flush()
            finally:
                os.close(self._file)


@cache
def _zeros(size: int) -> mmap.mmap:
    """Memory that takes up nothing, because it is never read."""
    return mmap.mmap(-1, size)

# SPDX-License-Identifier: Apache-2.0
"""The rows of a worker's layers in the activation store.

The engine core decides what is here; see `vllm.v1.capture.core.row_store`. Used on the
dispatch thread only.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from vllm.logger import init_logger
from vllm.v1.capture.delivery.spill import RowFiles, SpilledRows
from vllm.v1.capture.memory.budget import BUDGET
from vllm.v1.capture.memory.buffer_pool import RowCopy, RowMemory, copy_rows
from vllm.v1.residual.tap import Tap

logger = init_logger(__name__)

BYTES_AT_ONCE = 32 << 20
"""Bytes that are copied before the thread looks for other work."""

MOST_WAITING = 1 << 30
"""Most bytes of rows that wait to be copied. Until then, they are there twice."""


class StoredBlock:
    """The rows of one block at some taps of this worker."""

    def __init__(self, taps: Sequence[Tap], memory: torch.Tensor) -> None:
        """Start without rows; `memory` is for them, `[taps, size, width]`."""
        self._columns = {tap: column for column, tap in enumerate(taps)}
        self._shape = memory.shape
        self._rows: torch.Tensor | SpilledRows = memory
        self._filled = 0

    @property
    def is_whole(self) -> bool:
        """Whether all its rows have arrived."""
        return self._filled == self._shape[1]

    def put(self, place: int, rows: torch.Tensor, copies: list[RowCopy]) -> None:
        """Add rows `[taps, rows, width]` of the block from its row `place` on.

        Args:
            place: at most the number of rows that have arrived.
            rows: those that have arrived before are written again.
            copies: extended by the copy to do before the block is used.

        """
        stop = place + rows.shape[1]
        if isinstance(self._rows, torch.Tensor) and place <= self._filled < stop:
            strides = rows.stride()[:2]
            copies.append(RowCopy(self._rows, place, rows, 0, rows.shape[1], *strides))
            self._filled = stop

    def copy_to(
        self,
        memory: torch.Tensor,
        place: int,
        taps: Sequence[Tap],
        positions: range,
        copies: list[RowCopy],
    ) -> None:
        """Copy rows to `memory` `[taps, rows, width]`, from its row `place` on.

        Args:
            memory: has these taps.
            place: index of the first row.
            taps: all of them are stored.
            positions: of the tokens, within the block.
            copies: extended by the copies to do before the rows are read.

        Raises:
            OSError: the rows are on disk, and cannot be read.

        """
        rows, (_, size, _) = self._in_memory(), self._shape
        rows = rows.narrow(1, positions.start % size, len(positions))
        columns = [self._columns[tap] for tap in taps]
        pairs = [(memory, rows)]
        if columns != list(range(len(rows))):
            pairs = [(memory[n, None], rows[c, None]) for n, c in enumerate(columns)]
        copies += [
            RowCopy(to, place, of, 0, len(positions), *of.stride()[:2])
            for to, of in pairs
        ]

    def _in_memory(self) -> torch.Tensor:
        if isinstance(self._rows, torch.Tensor):
            return self._rows
        return self._rows.read(0, self._rows.num_rows).view(self._shape)

    def to_disk(self, files: RowFiles) -> None:
        """Write the rows to a file, and free their memory.

        Raises:
            OSError: they cannot be written, and stay in memory.

        """
        assert isinstance(self._rows, torch.Tensor), "rows leave the memory once"
        (self._rows,) = files.write([self._rows.flatten(0, 1)])


class RowStore:
    """The blocks, by their numbers.

    Rows are copied to them while the thread has nothing else to do, as their consumers
    have them already: done at once, with rows of all layers, it took a prompt's result
    1.6 times as long (8B, H200).
    """

    def __init__(self, folder: Path | None = None) -> None:
        """Start empty; `folder` is for the files of rows that leave the memory."""
        self._files = None if folder is None else RowFiles(folder)
        self._blocks: dict[int, StoredBlock] = {}
        # Other rows need large pieces of memory, which blocks would divide.
        self._memory = RowMemory(BUDGET)
        self._copies: deque[RowCopy] = deque()
        self._bytes_to_copy = 0

    def add(
        self, number: int, taps: Sequence[Tap], shape: Sequence[int], dtype: torch.dtype
    ) -> StoredBlock:
        """Add a block whose rows will arrive; `shape` is `[taps, size, width]`."""
        block = StoredBlock(taps, self._memory.empty(shape, dtype))
        self._blocks[number] = block
        return block

    def copy_later(self, copies: Sequence[RowCopy]) -> None:
        """Do these copies before a block is used; none of their rows changes."""
        self._copies.extend(copies)
        self._bytes_to_copy += sum([num_bytes(copy) for copy in copies])
        while self._bytes_to_copy > MOST_WAITING:
            self.copy_some()

    @property
    def has_to_copy(self) -> bool:
        """Whether copies wait."""
        return bool(self._copies)

    def copy_some(self) -> None:
        """Do some of the copies that wait, for about 3 ms."""
        some, size = [], 0
        while self._copies and size < BYTES_AT_ONCE:
            some.append(self._copies.popleft())
            size += num_bytes(some[-1])
        self._bytes_to_copy -= size
        copy_rows(some)

    def whole(self, numbers: Sequence[int]) -> Mapping[int, StoredBlock]:
        """Those of the blocks whose rows have all arrived, by number."""
        while self._copies:
            self.copy_some()
        known = {number: self._blocks.get(number) for number in numbers}
        return {n: block for n, block in known.items() if block and block.is_whole}

    def to_disk(self, number: int) -> None:
        """Move a block to the disk; it stays in memory if it cannot be written."""
        assert self._files is not None, "there is no folder"
        try:
            self._blocks[number].to_disk(self._files)
        except OSError as error:
            logger.error("Stored rows stay in memory, beyond its limit: %s", error)

    def drop(self, number: int) -> None:
        """Remove a block; of those that other stages have there is nothing."""
        self._blocks.pop(number, None)


def num_bytes(copy: RowCopy) -> int:
    """The bytes that are copied."""
    taps, _, width = copy.target.shape
    return taps * copy.num_rows * width * copy.target.itemsize

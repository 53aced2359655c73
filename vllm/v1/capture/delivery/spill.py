# SPDX-License-Identifier: Apache-2.0
"""Spilling of rows to disk.

Rows are written to unnamed temporary files, so nothing is left behind however the
process ends. The place of rows that have been released is used again, and a file is
closed as soon as its last rows have been.
"""

import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import IO
from weakref import WeakSet, finalize

import torch
from msgspec.structs import replace

from vllm.logger import init_logger
from vllm.v1.capture.delivery.row_bytes import raw_bytes, read_rows, write_all
from vllm.v1.capture.groups import GroupChunk
from vllm.v1.capture.memory.buffer_pool import Extents

logger = init_logger(__name__)

SEGMENT_BYTES = 64 << 20
"""A new file is started once the current one has reached this size."""

CALL_BYTES = 32 << 20
"""Maximum bytes per system call."""

RETRY_SECONDS = 5.0
"""Nothing is spilled for this long after a write has failed."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Segment:
    """A file; closed when the last rows in it are gone."""

    file: IO[bytes]
    extents: Extents
    size: int = 0
    """Bytes of the file."""

    def take(self, size: int) -> int | None:
        """A place for `size` bytes; returns its offset, None if there is none."""
        start = self.extents.take(size)
        if start is not None:
            self.size = max(self.size, start + size)
        return start


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class SpilledRows:
    """A tensor `[num_rows, width]` on disk; its space is freed with this object."""

    num_rows: int
    width: int
    dtype: torch.dtype
    segment: _Segment = field(repr=False)
    offset: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.width * self.dtype.itemsize

    def read(self, first: int, num_rows: int) -> torch.Tensor:
        """Read `num_rows` rows from disk, from the row `first` on.

        Raises:
            OSError: the read failed.

        """
        file, start = self.segment.file.fileno(), self.offset + first * self.row_bytes
        return read_rows(file, start, num_rows, self.width, self.dtype)

    def blocks(self, max_bytes: int) -> Iterator[torch.Tensor]:
        """Read the rows from disk in tensors of about `max_bytes`; raises as `read`."""
        at_once = max(max_bytes // self.row_bytes, 1)
        for first in range(0, self.num_rows, at_once):
            yield self.read(first, min(at_once, self.num_rows - first))


class RowFiles:
    """The files of spilled rows in one folder; thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._segments: WeakSet[_Segment] = WeakSet()
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """Bytes of the files on disk."""
        with self._lock:
            return sum(segment.size for segment in self._segments)

    def write(self, tensors: Sequence[torch.Tensor]) -> list[SpilledRows]:
        """Write tensors `[rows, width]` to disk.

        Raises:
            OSError: the write failed; nothing is kept.

        """
        found = []
        with self._lock:
            segment, start = self._room_for(sum(rows.nbytes for rows in tensors))
        offset = start
        for rows in tensors:
            num_rows, width = rows.shape
            spilled = SpilledRows(num_rows, width, rows.dtype, segment, offset)
            finalize(spilled, segment.extents.returned.append, (offset, rows.nbytes))
            found.append(spilled)
            offset += rows.nbytes
        # Outside of the lock: a hanging disk must not block other threads.
        file = segment.file.fileno()
        write_all(file, map(raw_bytes, tensors), CALL_BYTES, start)
        return found

    def _room_for(self, size: int) -> tuple[_Segment, int]:
        for segment in self._segments:
            start = segment.take(size)
            if start is not None:
                return segment, start
        extents = Extents(max(size, SEGMENT_BYTES))
        segment = _Segment(_unnamed_file(self._folder), extents)
        # Not in `__del__`, during which the set still has the segment: another thread
        # would write to a file that is being closed.
        finalize(segment, segment.file.close)
        self._segments.add(segment)
        start = segment.take(size)
        assert start is not None, "a new file has no room"
        return segment, start


def _unnamed_file(folder: Path) -> IO[bytes]:
    return tempfile.TemporaryFile(dir=folder, buffering=0)


class SpillStore:
    """The spilled packets of all sinks of a process, up to `max_bytes`; thread-safe."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._files = RowFiles(folder)
        self._max_bytes = max_bytes
        self._blocked_until = 0.0

    def write(self, items: Sequence[GroupChunk]) -> list[SpilledRows] | None:
        """Write rows to disk; None if there is no room or the write failed."""
        size = sum(item.tensor.nbytes for item in items)
        if monotonic() < self._blocked_until:
            return None
        if self._files.used_bytes + size > self._max_bytes:
            return None
        try:
            return self._files.write([item.tensor.flatten(0, 1) for item in items])
        except OSError as error:
            self._blocked_until = monotonic() + RETRY_SECONDS
            logger.error(
                "Captured rows cannot be spilled to %s: %s. Until this succeeds, the "
                "engine waits for its consumers",
                self._folder,
                str(error),  # The error itself has the frame that has the file.
            )
            return None


def read_back(item: GroupChunk, rows: SpilledRows) -> GroupChunk:
    """`item` with its rows, read from disk.

    Raises:
        OSError: the read failed.

    """
    shape = len(item.taps), len(item.positions), rows.width
    return replace(item, tensor=rows.read(0, rows.num_rows).view(shape))

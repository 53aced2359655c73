# SPDX-License-Identifier: Apache-2.0
"""Spilling of rows to disk.

Rows are appended to unnamed temporary files, so nothing is left behind however the
process ends. A file is closed as soon as its last rows have been released.
"""

import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import IO

import torch

from vllm.logger import init_logger
from vllm.v1.capture.delivery.row_bytes import raw_bytes, read_rows, write_all
from vllm.v1.capture.types import CaptureChunk, CaptureKey

logger = init_logger(__name__)

SEGMENT_BYTES = 64 << 20
"""A new file is started once the current one has reached this size."""

CALL_BYTES = 32 << 20
"""Maximum bytes per system call."""

RETRY_SECONDS = 5.0
"""Nothing is spilled for this long after a write has failed."""


@dataclass(slots=True, eq=False)
class _Segment:
    """A file, and the number of tensors in it that were not released."""

    file: IO[bytes]
    size: int = 0
    writes: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class SpilledRows:
    """A tensor `[num_rows, width]` on disk."""

    num_rows: int
    width: int
    dtype: torch.dtype
    segment: _Segment = field(repr=False)
    offset: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.width * self.dtype.itemsize

    def blocks(self, max_bytes: int) -> Iterator[torch.Tensor]:
        """Read the rows from disk in tensors of about `max_bytes`.

        Raises:
            OSError: the read failed.

        """
        file, at_once = self.segment.file.fileno(), max(max_bytes // self.row_bytes, 1)
        for first in range(0, self.num_rows, at_once):
            count = min(at_once, self.num_rows - first)
            start = self.offset + first * self.row_bytes
            yield read_rows(file, start, count, self.width, self.dtype)


class RowFiles:
    """The files of spilled rows in one folder; thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._segments: list[_Segment] = []
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """Bytes of the files on disk."""
        return sum(segment.size for segment in self._segments)

    def write(self, tensors: Sequence[torch.Tensor]) -> list[SpilledRows]:
        """Write tensors `[rows, width]` to disk; each must be released later.

        Raises:
            OSError: the write failed; nothing is kept.

        """
        size = sum(rows.nbytes for rows in tensors)
        with self._lock:
            segment = self._open_segment()
            start = segment.size
            segment.size += size
            segment.writes += len(tensors)
        file = segment.file.fileno()
        try:  # Outside of the lock: a hanging disk must not block other threads.
            write_all(file, map(raw_bytes, tensors), CALL_BYTES, start)
        except OSError:
            self._forget(segment, len(tensors))
            raise
        found, offset = [], start
        for rows in tensors:
            num_rows, width = rows.shape
            found.append(SpilledRows(num_rows, width, rows.dtype, segment, offset))
            offset += rows.nbytes
        return found

    def release(self, rows: SpilledRows) -> None:
        """Allow the space of the rows to be freed."""
        self._forget(rows.segment, 1)

    def _forget(self, segment: _Segment, writes: int) -> None:
        with self._lock:
            segment.writes -= writes
            assert segment.writes >= 0, "spilled rows were released twice"
            if segment.writes == 0:
                self._segments.remove(segment)
                segment.file.close()

    def _open_segment(self) -> _Segment:
        if not self._segments or self._segments[-1].size >= SEGMENT_BYTES:
            self._segments.append(_Segment(_unnamed_file(self._folder)))
        return self._segments[-1]


@dataclass(frozen=True, slots=True, eq=False)
class SpilledPacket:
    """A packet whose rows are on disk; their descriptions stay in memory."""

    num_rows: int
    num_bytes: int
    chunks: Sequence[CaptureChunk] = field(repr=False)
    """The chunks without their tensors."""
    rows: Sequence[SpilledRows] = field(repr=False)

    @property
    def keys(self) -> tuple[CaptureKey, ...]:
        """The key of each chunk."""
        return tuple(chunk.key for chunk in self.chunks)


class SpillStore:
    """The spilled packets of all sinks of a process, up to `max_bytes`; thread-safe."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._files = RowFiles(folder)
        self._max_bytes = max_bytes
        self._blocked_until = 0.0

    @property
    def used_bytes(self) -> int:
        """Bytes of the files on disk."""
        return self._files.used_bytes

    def write(
        self, chunks: Sequence[CaptureChunk], num_rows: int, num_bytes: int
    ) -> SpilledPacket | None:
        """Write a packet to disk; None if there is no room or the write failed."""
        if monotonic() < self._blocked_until:
            return None
        if self.used_bytes + num_bytes > self._max_bytes:
            return None
        try:
            rows = self._files.write([chunk.tensor for chunk in chunks])
        except OSError as error:
            self._blocked_until = monotonic() + RETRY_SECONDS
            logger.error(
                "Captured rows cannot be spilled to %s: %s. Until this succeeds, the "
                "engine waits for its consumers",
                self._folder,
                error,
            )
            return None
        empty = [replace(c, tensor=c.tensor.new_empty(0, 0)) for c in chunks]
        return SpilledPacket(num_rows, num_bytes, empty, rows)

    def read(self, packet: SpilledPacket) -> list[CaptureChunk]:
        """Read the chunks of a packet from disk.

        Raises:
            OSError: the read failed.

        """
        return [
            replace(chunk, tensor=_whole(rows))
            for chunk, rows in zip(packet.chunks, packet.rows, strict=True)
        ]

    def release(self, packet: SpilledPacket) -> None:
        """Allow the space of a packet to be freed."""
        for rows in packet.rows:
            self._files.release(rows)


def _whole(rows: SpilledRows) -> torch.Tensor:
    if not rows.num_rows:
        return torch.empty(0, rows.width, dtype=rows.dtype)
    (tensor,) = rows.blocks(rows.num_rows * rows.row_bytes)
    return tensor


def _unnamed_file(folder: Path) -> IO[bytes]:
    return tempfile.TemporaryFile(dir=folder, buffering=0)

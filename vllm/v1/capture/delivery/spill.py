# SPDX-License-Identifier: Apache-2.0
"""Rows that wait on disk: the one place that spills them.

Rows are appended to files without a name, so nothing is left behind however the
process ends. A file is given up as soon as its last rows have been released.
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
"""A file takes rows up to this size; then the next file begins."""

CALL_BYTES = 32 << 20
"""What one system call writes at most."""

RETRY_SECONDS = 5.0
"""After the disk has refused a write, this long nothing is written."""


@dataclass(slots=True, eq=False)
class _Segment:
    """One file, and how many writes in it are still needed."""

    file: IO[bytes]
    size: int = 0
    writes: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class SpilledRows:
    """Where rows of one width and dtype lie: `[num_rows, width]`."""

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
        """The rows, read from disk in tensors of about `max_bytes`.

        Raises:
            OSError: the disk does not give them back.

        """
        file, at_once = self.segment.file.fileno(), max(max_bytes // self.row_bytes, 1)
        for first in range(0, self.num_rows, at_once):
            count = min(at_once, self.num_rows - first)
            start = self.offset + first * self.row_bytes
            yield read_rows(file, start, count, self.width, self.dtype)


class RowFiles:
    """Files of spilled rows below one folder. Any thread may call."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._segments: list[_Segment] = []
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """What the files take on disk."""
        return sum(segment.size for segment in self._segments)

    def write(self, tensors: Sequence[torch.Tensor]) -> list[SpilledRows]:
        """Put tensors `[rows, width]` on disk; each is to be released.

        Raises:
            OSError: the disk refuses; none of them is there.

        """
        size = sum(rows.nbytes for rows in tensors)
        with self._lock:
            segment = self._open_segment()
            start = segment.size
            segment.size += size
            segment.writes += len(tensors)
        file = segment.file.fileno()
        try:  # Without the lock: a disk that hangs must hold up nobody else.
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
        """The rows are not needed any more."""
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
    """A packet whose rows lie on disk; what describes them stays in memory."""

    num_rows: int
    num_bytes: int
    chunks: Sequence[CaptureChunk] = field(repr=False)
    """Without their rows."""
    rows: Sequence[SpilledRows] = field(repr=False)

    @property
    def keys(self) -> tuple[CaptureKey, ...]:
        """What is lost if the disk does not give the packet back."""
        return tuple(chunk.key for chunk in self.chunks)


class SpillStore:
    """Packets of all sinks of a process, `max_bytes` of files at most.

    Any thread may call.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._files = RowFiles(folder)
        self._max_bytes = max_bytes
        self._blocked_until = 0.0

    @property
    def used_bytes(self) -> int:
        """What the files take on disk."""
        return self._files.used_bytes

    def write(
        self, chunks: Sequence[CaptureChunk], num_rows: int, num_bytes: int
    ) -> SpilledPacket | None:
        """Put a packet on disk; None if there is no room, or the disk refuses."""
        if monotonic() < self._blocked_until:
            return None
        if self.used_bytes + num_bytes > self._max_bytes:
            return None
        try:
            rows = self._files.write([chunk.tensor for chunk in chunks])
        except OSError as error:
            self._blocked_until = monotonic() + RETRY_SECONDS
            logger.error(
                "Captured rows cannot be spilled to %s: %s. Until they can, the "
                "engine waits for its consumers",
                self._folder,
                error,
            )
            return None
        empty = [replace(c, tensor=c.tensor.new_empty(0, 0)) for c in chunks]
        return SpilledPacket(num_rows, num_bytes, empty, rows)

    def read(self, packet: SpilledPacket) -> list[CaptureChunk]:
        """The chunks of a packet.

        Raises:
            OSError: the disk does not give them back.

        """
        return [
            replace(chunk, tensor=_whole(rows))
            for chunk, rows in zip(packet.chunks, packet.rows, strict=True)
        ]

    def release(self, packet: SpilledPacket) -> None:
        """The packet is not needed any more."""
        for rows in packet.rows:
            self._files.release(rows)


def _whole(rows: SpilledRows) -> torch.Tensor:
    if not rows.num_rows:
        return torch.empty(0, rows.width, dtype=rows.dtype)
    (tensor,) = rows.blocks(rows.num_rows * rows.row_bytes)
    return tensor


def _unnamed_file(folder: Path) -> IO[bytes]:
    return tempfile.TemporaryFile(dir=folder, buffering=0)

# SPDX-License-Identifier: Apache-2.0
"""Rows that wait on disk while a consumer is behind.

Packets are appended to files without a name, so nothing is left behind however
the process ends. A file is given up as soon as its last packet has been read.
"""

import os
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import IO

from vllm.logger import init_logger
from vllm.v1.capture.transport.zmq_channel import WireChunk
from vllm.v1.capture.types import CaptureChunk, CaptureKey
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

logger = init_logger(__name__)

SEGMENT_BYTES = 64 << 20
"""A file takes packets up to this size; then the next file begins."""

RETRY_SECONDS = 5.0
"""After the disk has refused a write, this long nothing is written."""


@dataclass(slots=True, eq=False)
class _Segment:
    """One file, and how many of its packets are still needed."""

    file: IO[bytes]
    size: int = 0
    packets: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class SpilledPacket:
    """Where the chunks of a packet lie."""

    num_rows: int
    num_bytes: int
    keys: tuple[CaptureKey, ...]
    """What is lost if the disk does not give the packet back."""
    segment: _Segment = field(repr=False)
    offset: int
    frames: tuple[int, ...]
    """Sizes of the message's parts, one after the other from `offset` on."""


class SpillStore:
    """Packets of all sinks of a process, `max_bytes` of files at most.

    Any thread may call.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._segments: list[_Segment] = []
        self._blocked_until = 0.0
        self._lock = threading.Lock()
        self._encoder = MsgpackEncoder()

    @property
    def used_bytes(self) -> int:
        """What the files take on disk."""
        return sum(segment.size for segment in self._segments)

    def write(
        self, chunks: Sequence[CaptureChunk], num_rows: int, num_bytes: int
    ) -> SpilledPacket | None:
        """Put a packet on disk; None if there is no room, or the disk refuses."""
        with self._lock:
            if monotonic() < self._blocked_until:
                return None
            wire = [WireChunk.of(chunk) for chunk in chunks]
            parts = self._encoder.encode(wire)
            frames = [memoryview(part).cast("B") for part in parts]  # type: ignore[arg-type]
            sizes = tuple(frame.nbytes for frame in frames)
            if self.used_bytes + sum(sizes) > self._max_bytes:
                return None
            try:
                segment = self._open_segment()
                offset = self._append(segment, frames)
            except OSError as error:
                self._blocked_until = monotonic() + RETRY_SECONDS
                logger.error(
                    "Captured rows cannot be spilled to %s: %s. Until they can, the "
                    "engine waits for its consumers",
                    self._folder,
                    error,
                )
                return None
            segment.packets += 1
            keys = tuple(chunk.key for chunk in chunks)
            return SpilledPacket(num_rows, num_bytes, keys, segment, offset, sizes)

    def read(self, packet: SpilledPacket) -> list[CaptureChunk]:
        """The chunks of a packet.

        Raises:
            OSError: the disk does not give them back.

        """
        descriptor, offset = packet.segment.file.fileno(), packet.offset
        frames = []
        for size in packet.frames:
            frames.append(_read_exactly(descriptor, size, offset))
            offset += size
        decoder = MsgpackDecoder(list[WireChunk], share_mem=False)
        return [wire.chunk() for wire in decoder.decode(frames)]

    def release(self, packet: SpilledPacket) -> None:
        """The packet is not needed any more."""
        with self._lock:
            segment = packet.segment
            segment.packets -= 1
            assert segment.packets >= 0, "a spilled packet was released twice"
            if segment.packets == 0:
                self._segments.remove(segment)
                segment.file.close()

    def _open_segment(self) -> _Segment:
        if self._segments and self._segments[-1].size < SEGMENT_BYTES:
            return self._segments[-1]
        file = _unnamed_file(self._folder)
        self._segments.append(_Segment(file))
        return self._segments[-1]

    def _append(self, segment: _Segment, frames: Sequence[memoryview]) -> int:
        offset = end = segment.size
        try:
            for frame in frames:
                end += _write_all(segment.file.fileno(), frame, end)
        except OSError:
            os.ftruncate(segment.file.fileno(), offset)
            if not segment.packets:
                self._segments.remove(segment)
                segment.file.close()
            raise
        segment.size = end
        return offset


def _unnamed_file(folder: Path) -> IO[bytes]:
    return tempfile.TemporaryFile(dir=folder, buffering=0)


def _write_all(descriptor: int, data: memoryview, offset: int) -> int:
    written = 0
    while written < data.nbytes:
        written += os.pwrite(descriptor, data[written:], offset + written)
    return written


def _read_exactly(descriptor: int, size: int, offset: int) -> bytearray:
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size:
        got = os.preadv(descriptor, [view[done:]], offset + done)
        if got == 0:
            raise OSError(f"a spilled packet ends after {done} of {size} bytes")
        done += got
    return data

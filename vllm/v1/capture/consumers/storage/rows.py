# SPDX-License-Identifier: Apache-2.0
"""The rows of one request until they are written: in memory, else in a spill file."""

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from vllm.v1.capture.consumers.storage.files import raw_bytes, write_all
from vllm.v1.capture.plan import Tap

_JOINED = 64
"""So many pieces of a key are joined: decoding brings one row at a time."""


@dataclass(frozen=True, slots=True)
class _Extent:
    offset: int
    num_rows: int


@dataclass(slots=True)
class _Key:
    width: int
    dtype: torch.dtype
    spilled: list[_Extent] = field(default_factory=list)
    pieces: list[torch.Tensor] = field(default_factory=list)
    small: int = 0
    """How many pieces at the end of the list have not been joined."""


class RequestRows:
    """Rows in the order of their arrival, by `(layer, hook)`.

    One thread adds, another spills and reads; a lock keeps them apart.
    """

    def __init__(self) -> None:
        self._keys: dict[Tap, _Key] = {}
        self._lock = threading.Lock()
        self._spill_path: str | None = None
        self._spill_end = 0
        self.memory_bytes = 0
        """Bytes of rows that lie in memory."""

    @property
    def spilled(self) -> bool:
        """Whether some rows do not lie in memory."""
        return self._spill_path is not None

    def add(self, tap: Tap, rows: torch.Tensor) -> None:
        """Append rows `[rows, width]`, which are not copied."""
        with self._lock:
            key = self._keys.get(tap)
            if key is None:
                key = self._keys[tap] = _Key(rows.shape[1], rows.dtype)
            key.pieces.append(rows)
            key.small += 1
            self.memory_bytes += rows.nbytes
            if key.small == _JOINED:
                joined = torch.cat(key.pieces[-_JOINED:])
                key.pieces[-_JOINED:] = [joined]
                key.small = 0

    def spill(self, path: str, max_bytes: int) -> int:
        """Move what lies in memory to the end of the file `path`.

        The path must be the same each time. Returns the bytes of memory freed;
        if writing fails, the rows are lost and the error is raised.
        """
        with self._lock:
            taken = {tap: key.pieces for tap, key in self._keys.items() if key.pieces}
            for tap in taken:
                self._keys[tap].pieces = []
                self._keys[tap].small = 0
            size, self.memory_bytes = self.memory_bytes, 0
        extents: dict[Tap, _Extent] = {}
        self._spill_path = path
        try:
            end = self._write_spilled(path, taken, extents, max_bytes)
        except OSError:
            with self._lock:  # for `discard`, which the caller owes
                self.memory_bytes += size
            raise
        with self._lock:
            for tap, extent in extents.items():
                if tap in self._keys:  # not discarded in the meantime
                    self._keys[tap].spilled.append(extent)
        self._spill_end = end
        return size

    def _write_spilled(
        self,
        path: str,
        taken: dict[Tap, list[torch.Tensor]],
        extents: dict[Tap, _Extent],
        max_bytes: int,
    ) -> int:
        end = self._spill_end
        fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.lseek(fd, end, os.SEEK_SET)
            for tap, pieces in taken.items():
                extents[tap] = _Extent(end, sum(map(len, pieces)))
                end += write_all(fd, map(raw_bytes, pieces), max_bytes)
        finally:
            os.close(fd)
        return end

    def blocks(self, tap: Tap, num_rows: int, max_bytes: int) -> Iterator[torch.Tensor]:
        """The first `num_rows` rows of a key, as tensors of about `max_bytes`.

        Rows in memory come as the pieces they are. Call when all were added.
        """
        key = self._keys.get(tap)
        if key is None:
            return
        left = num_rows
        for block in self._stored(key, max_bytes):
            if left <= 0:
                return
            yield block[:left]
            left -= len(block)
        for piece in key.pieces:
            if left <= 0:
                return
            yield piece[:left]
            left -= len(piece)

    def _stored(self, key: _Key, max_bytes: int) -> Iterator[torch.Tensor]:
        if not key.spilled:
            return
        assert self._spill_path is not None, "spilled rows have a file"
        row_bytes = key.width * key.dtype.itemsize
        at_once = max(max_bytes // row_bytes, 1)
        with open(self._spill_path, "rb", buffering=0) as file:
            for extent in key.spilled:
                for first in range(0, extent.num_rows, at_once):
                    count = min(at_once, extent.num_rows - first)
                    data = bytearray(count * row_bytes)
                    file.seek(extent.offset + first * row_bytes)
                    if _read_into(file.fileno(), data) != len(data):
                        raise OSError(f"{self._spill_path} was cut short")
                    yield torch.frombuffer(data, dtype=key.dtype).view(count, -1)

    def discard(self) -> int:
        """Forget the rows and remove the spill file; returns the bytes freed."""
        with self._lock:
            freed, self.memory_bytes = self.memory_bytes, 0
            self._keys.clear()
        if self._spill_path is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._spill_path)
            self._spill_path = None
        return freed


def _read_into(fd: int, data: bytearray) -> int:
    view, got = memoryview(data), 0
    while got < len(data):
        count = os.readv(fd, [view[got:]])
        if not count:
            break
        got += count
    return got

# SPDX-License-Identifier: Apache-2.0
"""The rows of one request until they are written, in memory or spilled to disk."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

import torch

from vllm.v1.capture.delivery.spill import RowFiles, SpilledRows
from vllm.v1.capture.plan import Tap

_JOINED = 64
"""Number of pieces that are joined at a time: decoding adds one row per step."""


@dataclass(slots=True, eq=False)
class _Key:
    """The rows of one key as tensors `[rows, width]`, in order, those on disk first."""

    spilled: list[SpilledRows] = field(default_factory=list)
    pieces: list[torch.Tensor] = field(default_factory=list)
    small: int = 0
    """Number of pieces at the end of the list that were not joined."""

    def take(self) -> list[torch.Tensor]:
        """Remove and return the pieces in memory."""
        taken, self.pieces, self.small = self.pieces, [], 0
        return taken


class RequestRows:
    """The rows of a request by `(layer, hook)`, in order of arrival.

    One thread adds rows; others spill or read them, one at a time.
    """

    def __init__(self) -> None:
        self._keys: dict[Tap, _Key] = {}
        self._lock = threading.Lock()
        self._spilling = threading.Lock()
        """Held while rows are written to disk, which may hang."""
        self._discarded = False
        self._files: RowFiles | None = None
        """The files of spilled rows, if any."""
        self.memory_bytes = 0
        """Bytes of rows in memory."""

    @property
    def spilled(self) -> bool:
        """Whether some rows are on disk."""
        return self._files is not None

    def add(self, tap: Tap, rows: torch.Tensor) -> None:
        """Append rows `[rows, width]` without a copy."""
        with self._lock:
            key = self._keys.setdefault(tap, _Key())
            key.pieces.append(rows)
            key.small += 1
            self.memory_bytes += rows.nbytes
            if key.small == _JOINED:
                joined = torch.cat(key.pieces[-_JOINED:])
                key.pieces[-_JOINED:] = [joined]
                key.small = 0

    def spill(self, files: RowFiles) -> int:
        """Move the rows in memory to disk; returns the bytes of memory freed.

        Raises:
            OSError: the write failed; the caller must call `discard`.

        """
        with self._spilling:
            with self._lock:
                taken = {key: key.take() for key in self._keys.values() if key.pieces}
                size, self.memory_bytes = self.memory_bytes, 0
            if not taken:
                return 0
            try:
                written = files.write([r for pieces in taken.values() for r in pieces])
            except OSError:
                with self._lock:  # Counted again, so that `discard` returns it.
                    self.memory_bytes += size
                raise
            left = iter(written)
            with self._lock:
                self._files = files
                if self._discarded:
                    for rows in written:
                        files.release(rows)
                    return size
                for key, pieces in taken.items():
                    key.spilled += islice(left, len(pieces))
            return size

    def blocks(self, tap: Tap, num_rows: int, max_bytes: int) -> Iterator[torch.Tensor]:
        """Yield the first `num_rows` rows of a key, after all rows were added.

        Spilled rows are read in blocks of about `max_bytes`; rows in memory are yielded
        as they are.
        """
        with self._spilling, self._lock:
            key = self._keys.get(tap)
            spilled, pieces = (key.spilled[:], key.pieces[:]) if key else ([], [])
        left = num_rows
        for rows in spilled:
            for block in rows.blocks(max_bytes):
                if left <= 0:
                    return
                yield block[:left]
                left -= len(block)
        for piece in pieces:
            if left <= 0:
                return
            yield piece[:left]
            left -= len(piece)

    def discard(self) -> int:
        """Discard all rows; returns the bytes of memory freed."""
        with self._lock:
            freed, self.memory_bytes = self.memory_bytes, 0
            keys, self._keys, self._discarded = self._keys, {}, True
        for key in keys.values():
            for rows in key.spilled:
                assert self._files is not None, "spilled rows lie in files"
                self._files.release(rows)
        return freed

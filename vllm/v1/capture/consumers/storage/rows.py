# SPDX-License-Identifier: Apache-2.0
"""The rows of one request until they are written: in memory, or spilled."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

import torch

from vllm.v1.capture.delivery.spill import RowFiles, SpilledRows
from vllm.v1.capture.plan import Tap

_JOINED = 64
"""So many pieces of a key are joined: decoding brings one row at a time."""


@dataclass(slots=True, eq=False)
class _Key:
    """Pieces `[rows, width]` in order, those on disk first."""

    spilled: list[SpilledRows] = field(default_factory=list)
    pieces: list[torch.Tensor] = field(default_factory=list)
    small: int = 0
    """How many pieces at the end of the list have not been joined."""

    def take(self) -> list[torch.Tensor]:
        """What is in memory, which is not held any more."""
        taken, self.pieces, self.small = self.pieces, [], 0
        return taken


class RequestRows:
    """Rows in the order of their arrival, by `(layer, hook)`.

    One thread adds, others spill and read, one of them at a time.
    """

    def __init__(self) -> None:
        self._keys: dict[Tap, _Key] = {}
        self._lock = threading.Lock()
        self._spilling = threading.Lock()
        """Held while rows are written to disk, which may hang."""
        self._discarded = False
        self._files: RowFiles | None = None
        """Where spilled rows are."""
        self.memory_bytes = 0
        """Bytes of rows that lie in memory."""

    @property
    def spilled(self) -> bool:
        """Whether some rows do not lie in memory."""
        return self._files is not None

    def add(self, tap: Tap, rows: torch.Tensor) -> None:
        """Append rows `[rows, width]`, which are not copied."""
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
        """Move what lies in memory to disk; returns the bytes of memory freed.

        Raises:
            OSError: the disk refuses; what is in memory is to be discarded.

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
                with self._lock:  # for `discard`, which the caller owes
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
        """The first `num_rows` rows of a key; what was spilled in parts of `max_bytes`.

        Rows in memory come as the pieces they are. Call when all were added.
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
        """Forget the rows, spilled ones too; returns the bytes of memory freed."""
        with self._lock:
            freed, self.memory_bytes = self.memory_bytes, 0
            keys, self._keys, self._discarded = self._keys, {}, True
        for key in keys.values():
            for rows in key.spilled:
                assert self._files is not None, "spilled rows lie in files"
                self._files.release(rows)
        return freed

# SPDX-License-Identifier: Apache-2.0
"""The state of one request at a storage consumer: its rows, sidecars and results.

Until they are written, rows are in memory or spilled to disk.
"""

import errno
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from vllm.logger import init_logger
from vllm.v1.capture.delivery.spill import RowFiles, SpilledRows
from vllm.v1.capture.types import CaptureFinalize, CaptureKey, CaptureResult
from vllm.v1.residual.tap import Tap


@dataclass(slots=True, eq=False)
class _Key:
    """The rows of one key as tensors `[rows, width]`, in order, those on disk first."""

    spilled: list[SpilledRows] = field(default_factory=list)
    pieces: list[torch.Tensor] = field(default_factory=list)


class RequestRows:
    """The rows of a request by `(layer, hook)`, in order of arrival.

    One thread adds rows; others spill or read them, one at a time.
    """

    def __init__(self) -> None:
        self._keys: dict[Tap, _Key] = {}
        self._lock = threading.Lock()
        self._spilling = threading.Lock()
        """Held while rows are written to disk, which may hang."""
        self.memory_bytes = 0
        """Bytes of rows in memory."""

    def add(self, taps: Sequence[Tap], rows: torch.Tensor) -> None:
        """Append rows `[taps, rows, width]` without a copy."""
        with self._lock:
            for tap, own in zip(taps, rows.unbind(), strict=True):
                self._keys.setdefault(tap, _Key()).pieces.append(own)
            self.memory_bytes += rows.nbytes

    def spill(self, files: RowFiles) -> int:
        """Move the rows in memory to disk; returns the bytes of memory freed.

        Raises:
            OSError: the write failed; the caller must call `discard`.

        """
        with self._spilling:
            with self._lock:
                taken = {key: key.pieces for key in self._keys.values() if key.pieces}
                if not taken:
                    # What is still counted belongs to a write that has failed.
                    return 0
                for key in taken:
                    key.pieces = []
                size, self.memory_bytes = self.memory_bytes, 0
            try:
                written = files.write([r for pieces in taken.values() for r in pieces])
            except OSError:
                with self._lock:  # Counted again, so that `discard` returns it.
                    self.memory_bytes += size
                raise
            left = iter(written)
            with self._lock:
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
            freed, self.memory_bytes, self._keys = self.memory_bytes, 0, {}
        return freed


logger = init_logger(__name__)


def results_of(
    finalizes: Sequence[CaptureFinalize], payload: Any = None
) -> list[CaptureResult]:
    """A result for each key; only the first has the payload, as these are joined."""
    first, *others = (finalize.key for finalize in finalizes)
    return [
        CaptureResult(first, "ok", payload=payload),
        *(CaptureResult(key, "ok") for key in others),
    ]


@dataclass(slots=True)
class StoredRequest:
    """Rows, sidecars and results of a request.

    The consumer's thread fills it until the request has ended, then a writer thread
    uses it. Either of them, or the clock thread, may settle it; only the first call has
    an effect.
    """

    request_id: str
    rows: RequestRows = field(default_factory=RequestRows)
    finalizes: dict[CaptureKey, CaptureFinalize] = field(default_factory=dict)
    failure: str | None = None
    """Why rows of the request were lost before it ended."""
    ended_at: float | None = None
    published: bool = False
    """Whether its rows were written, to a file of its own or to an open shard."""
    spilling: bool = False
    results: dict[CaptureKey, CaptureResult] = field(default_factory=dict)
    settled: threading.Event = field(default_factory=threading.Event)
    _given_up: bool = False
    _callbacks: list[Callable[[], None]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_pending(self) -> bool:
        """Whether it has ended and its results are not final."""
        return self.ended_at is not None and not self.settled.is_set()

    def writable(self) -> list[CaptureFinalize]:
        """The keys to write; those that have failed get an error result."""
        good = []
        for key, finalize in self.finalizes.items():
            error = self.failure or finalize.sidecar.get("capture_error")
            if error is not None:
                self.results[key] = CaptureResult(key, "error", error)
            else:
                good.append(finalize)
        return good

    def blocks(
        self, finalize: CaptureFinalize, max_bytes: int
    ) -> Iterator[torch.Tensor]:
        """Yield the valid rows of a key in blocks of about `max_bytes`.

        Raises:
            OSError: rows are missing; raised after all others were yielded.

        """
        _, layer, hook = finalize.key
        wanted, found = finalize.sidecar["num_rows"], 0
        for block in self.rows.blocks((layer, hook), wanted, max_bytes):
            found += len(block)
            yield block
        if found != wanted:
            raise OSError(f"only {found} of {wanted} rows are available")

    def commit(self) -> None:
        """Called before a file of the request gets its final name.

        Raises:
            OSError: (ECANCELED) the request has failed with a timeout.

        """
        with self._lock:
            if self._given_up:
                raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))

    def settle(self, results: Iterable[CaptureResult]) -> None:
        """Make the results final; keys without a result get an error."""
        with self._lock:
            if self.settled.is_set():
                return
            self.results.update({result.key: result for result in results})
            for key in self.finalizes:
                if key not in self.results:
                    self.results[key] = CaptureResult(key, "error", "not written")
            self.settled.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def settle_error(self, error: str) -> None:
        """Settle with an error for all keys that have no result yet."""
        if self.settled.is_set():
            return
        logger.error("The capture of %s was not written: %s", self.request_id, error)
        self.settle(
            CaptureResult(key, "error", error)
            for key in self.finalizes
            if key not in self.results
        )

    def give_up(self, error: str) -> None:
        """Settle with errors, and prevent files that are not finished."""
        with self._lock:
            self._given_up = True
        self.settle_error(error)

    def when_settled(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the results are final; at once if they are already."""
        with self._lock:
            if not self.settled.is_set():
                self._callbacks.append(callback)
                return
        callback()

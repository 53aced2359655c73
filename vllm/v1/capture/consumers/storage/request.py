# SPDX-License-Identifier: Apache-2.0
"""The state of one request at a storage consumer."""

import errno
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch

from vllm.logger import init_logger
from vllm.v1.capture.consumers.storage.rows import RequestRows
from vllm.v1.capture.types import CaptureFinalize, CaptureKey, CaptureResult

logger = init_logger(__name__)


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

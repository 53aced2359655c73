# SPDX-License-Identifier: Apache-2.0
"""Shards: files that many requests share, and when they are opened and sealed.

A shard is sealed, and gets its final name, when it is full or shortly after the last
request was added. The requests in it get their results only then, so that a file named
in a result can always be read.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from time import monotonic
from typing import Generic, TypeAlias, TypeVar

from vllm.v1.capture.consumers.storage.stored_request import StoredRequest
from vllm.v1.capture.consumers.storage.threads import Task
from vllm.v1.capture.types import CaptureResult
from vllm.v1.residual.plugin_errors import described

IDLE_SECONDS = 0.1
"""A shard is sealed if no request was added for this time, while others run."""

LAST_SECONDS = 0.02
"""The same while none runs, so that none can be added soon."""

AGE_SECONDS = 1.0
"""A shard is sealed once its first request has waited for this time."""


class Shard(ABC):
    """An open shard. `lock` must be held to add to it or to seal it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.sealed = False
        """Whether no more requests can be added."""
        self.written_out = False
        self.num_bytes = 0
        self.pending = 0
        """Number of requests whose bytes are being written."""
        self._waiting: list[tuple[StoredRequest, list[CaptureResult]]] = []
        self._first = self._last = self._asked = 0.0

    def wait_for_seal(
        self, request: StoredRequest, results: list[CaptureResult]
    ) -> None:
        """Settle `request` with `results` when the shard is sealed."""
        self._last = monotonic()
        if not self._waiting:
            self._first = self._last
        self._waiting.append((request, results))

    def is_due(self, now: float, closing: bool, running: bool) -> bool:
        """Whether to call `seal`; true at most once a second until that is done.

        Args:
            now: monotonic time, in seconds.
            closing: whether all shards are sealed.
            running: whether the consumer has requests that were not published.

        """
        if self.written_out or (now - self._asked < 1.0 and not closing):
            return False
        if self.sealed:
            is_due = not self.pending
        else:
            limit = IDLE_SECONDS if running else LAST_SECONDS
            idle = not self.pending and now - self._last > limit
            is_late = closing or idle or now - self._first > AGE_SECONDS
            is_due = bool(self._waiting) and is_late
        if is_due:
            self._asked = now
        return is_due

    def seal(self) -> None:
        """Accept no more requests, and finish the file once all bytes are written.

        The caller holds the lock.
        """
        self.sealed = True
        if self.pending or self.written_out:
            self._asked = 0.0
            return
        self.written_out = True
        try:
            self.write_out()
        except Exception as error:
            for request, _ in self._waiting:
                request.settle_error(described(error))
        else:
            for request, results in self._waiting:
                request.settle(results)

    @abstractmethod
    def write_out(self) -> None:
        """Complete the file and give it its final name; on failure, remove it."""


S = TypeVar("S", bound=Shard)

ShardKey: TypeAlias = tuple[Hashable, ...]
"""The tag, a number, and whatever else the requests of a shard must have in common."""


class ShardSet(Generic[S]):
    """The open shards, one per key."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._open: dict[ShardKey, S] = {}
        self._full: list[S] = []
        """Shards that are sealed but still being written."""
        self._lock = threading.Lock()

    def add(
        self,
        keys: Sequence[ShardKey],
        new: Callable[[], S],
        work: Callable[[S], None],
    ) -> S:
        """Call `work` on a shard under its lock, then seal the shard if it is full.

        Args:
            keys: candidates; the first whose lock is free is used, otherwise the first.
            new: creates a shard.
            work: called with the shard.

        Returns:
            The shard.

        """
        while True:
            shard = self._locked(keys, new)
            try:
                if shard.sealed:
                    continue
                try:
                    work(shard)
                finally:
                    if shard.num_bytes >= self._max_bytes:
                        shard.seal()
                return shard
            finally:
                shard.lock.release()

    def _locked(self, keys: Sequence[ShardKey], new: Callable[[], S]) -> S:
        for key in keys:
            shard = self._shard(key, new)
            if shard.lock.acquire(blocking=False):
                return shard
        shard = self._shard(keys[0], new)
        shard.lock.acquire()
        return shard

    def _shard(self, key: ShardKey, new: Callable[[], S]) -> S:
        with self._lock:
            shard = self._open.get(key)
            if shard is None or shard.sealed:
                self._retire(key)
                shard = self._open[key] = new()
            return shard

    def _retire(self, key: ShardKey) -> None:
        shard = self._open.pop(key, None)
        if shard is not None and not shard.written_out:
            self._full.append(shard)

    def idlest(self, keys: Sequence[tuple[str, int]]) -> tuple[str, int]:
        """The first of the keys whose shards are written to by the fewest requests.

        A file system lets one thread at a time write to a file.
        """
        with self._lock:
            busy = {key: shard.pending for key, shard in self._open.items()}
        return min(keys, key=lambda key: busy.get(key, 0))

    def due(self, now: float, closing: bool, running: bool) -> Sequence[Task]:
        """Tasks that seal the shards that are due; see `Publisher.due`."""
        with self._lock:
            for key in [key for key, shard in self._open.items() if shard.sealed]:
                self._retire(key)
            self._full = [shard for shard in self._full if not shard.written_out]
            shards = [*self._open.values(), *self._full]
        return [
            _sealing(shard) for shard in shards if shard.is_due(now, closing, running)
        ]


def _sealing(shard: Shard) -> Task:
    def seal() -> None:
        with shard.lock:
            shard.seal()

    return seal

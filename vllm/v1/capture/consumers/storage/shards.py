# SPDX-License-Identifier: Apache-2.0
"""Shards: files that many requests share, and when they are opened and sealed.

A shard is sealed, and gets its final name, when it is full or shortly after the last
request was added. The requests in it get their results only then, so that a file named
in a result can always be read.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, Generic, TypeAlias, TypeVar

from vllm.v1.capture.consumers.storage.stored_request import StoredRequest
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
        self.lock = threading.RLock()
        self.sealed = False
        """Whether no more requests can be added: the file is finished, or lost."""
        self.num_bytes = 0
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
        if self.sealed or (now - self._asked < 1.0 and not closing):
            return False
        limit = IDLE_SECONDS if running else LAST_SECONDS
        idle = now - self._last > limit
        is_late = closing or idle or now - self._first > AGE_SECONDS
        is_due = bool(self._waiting) and is_late
        if is_due:
            self._asked = now
        return is_due

    def seal(self) -> None:
        """Accept no more requests, and finish the file."""
        with self.lock:
            if self.sealed:
                return
            self.sealed = True
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

Task: TypeAlias = Callable[[], None]
"""What a writer thread does."""

ShardKey: TypeAlias = tuple[Any, ...]
"""The tag, a number, and whatever else the requests of a shard must have in common."""


class ShardSet(Generic[S]):
    """The open shards, one per key."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._open: dict[ShardKey, S] = {}
        self._lock = threading.Lock()

    def add(
        self,
        keys: Sequence[ShardKey],
        new: Callable[[ShardKey], S],
        work: Callable[[S], None],
    ) -> None:
        """Call `work` on a shard under its lock, then seal the shard if it is full.

        Args:
            keys: candidates; the first whose lock is free is used, otherwise the first.
            new: creates the shard of a key.
            work: called with the shard.

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
                return
            finally:
                shard.lock.release()

    def _locked(self, keys: Sequence[ShardKey], new: Callable[[ShardKey], S]) -> S:
        for key in keys:
            shard = self._shard(key, new)
            if shard.lock.acquire(blocking=False):
                return shard
        shard = self._shard(keys[0], new)
        shard.lock.acquire()
        return shard

    def _shard(self, key: ShardKey, new: Callable[[ShardKey], S]) -> S:
        with self._lock:
            shard = self._open.get(key)
            if shard is None or shard.sealed:
                shard = self._open[key] = new(key)
            return shard

    def due(self, now: float, closing: bool, running: bool) -> Sequence[Task]:
        """Tasks that seal the shards whose time has come; called many times a second.

        Args:
            now: monotonic time, in seconds.
            closing: whether to seal all shards.
            running: whether the consumer has requests that were not published.

        """
        with self._lock:
            self._open = {k: one for k, one in self._open.items() if not one.sealed}
            shards = list(self._open.values())
        return [shard.seal for shard in shards if shard.is_due(now, closing, running)]

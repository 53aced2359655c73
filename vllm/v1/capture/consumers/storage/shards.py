# SPDX-License-Identifier: Apache-2.0
"""Files that many requests share: when they are opened, and when they are sealed.

A shard gets its name when it is full, or soon after requests stop coming; until
then the requests in it wait for their results, so that what a result names can
always be read.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Generic, TypeVar

from vllm.v1.capture.consumers.storage.request import StoredRequest
from vllm.v1.capture.consumers.storage.threads import Task
from vllm.v1.capture.types import CaptureResult

IDLE_SECONDS = 0.1
"""A shard is sealed if no request has come for so long."""

AGE_SECONDS = 1.0
"""A shard is sealed once its first request has waited for so long."""


class Shard(ABC):
    """A file under way. Its lock is held by whoever adds to it or seals it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.sealed = False
        """Whether it takes no more requests."""
        self.written_out = False
        self.num_bytes = 0
        self.pending = 0
        """Requests whose bytes are on their way to the file."""
        self._waiting: list[tuple[StoredRequest, list[CaptureResult]]] = []
        self._first = self._last = self._asked = 0.0

    def wait_for_seal(
        self, request: StoredRequest, results: list[CaptureResult]
    ) -> None:
        """The request is in the shard; `results` hold once it is sealed."""
        self._last = monotonic()
        if not self._waiting:
            self._first = self._last
        self._waiting.append((request, results))

    def is_due(self, now: float, closing: bool) -> bool:
        """Whether `seal` has something to do; true once a second until it is done."""
        if self.written_out or (now - self._asked < 1.0 and not closing):
            return False
        if self.sealed:
            is_due = not self.pending
        else:
            idle = not self.pending and now - self._last > IDLE_SECONDS
            is_late = closing or idle or now - self._first > AGE_SECONDS
            is_due = bool(self._waiting) and is_late
        if is_due:
            self._asked = now
        return is_due

    def seal(self) -> None:
        """Take no more; finish the file once all bytes are there. The lock is held."""
        self.sealed = True
        if self.pending or self.written_out:
            self._asked = 0.0
            return
        self.written_out = True
        try:
            self.write_out()
        except Exception as error:
            for request, _ in self._waiting:
                request.settle_error(f"{type(error).__name__}: {error}")
        else:
            for request, results in self._waiting:
                request.settle(results)

    @abstractmethod
    def write_out(self) -> None:
        """Complete the file and give it its name; on failure leave nothing."""


S = TypeVar("S", bound=Shard)


class ShardSet(Generic[S]):
    """The shards under way, one per key."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._open: dict[tuple[str, int], S] = {}
        self._full: list[S] = []
        """Sealed, with bytes still on their way."""
        self._lock = threading.Lock()

    def add(
        self,
        keys: Sequence[tuple[str, int]],
        new: Callable[[], S],
        work: Callable[[S], None],
    ) -> S:
        """Do `work` on a shard under its lock, and seal it if it is full by then.

        It is the first of `keys` that nobody works on now, or the first one.
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

    def _locked(self, keys: Sequence[tuple[str, int]], new: Callable[[], S]) -> S:
        for key in keys:
            shard = self._shard(key, new)
            if shard.lock.acquire(blocking=False):
                return shard
        shard = self._shard(keys[0], new)
        shard.lock.acquire()
        return shard

    def _shard(self, key: tuple[str, int], new: Callable[[], S]) -> S:
        with self._lock:
            shard = self._open.get(key)
            if shard is None or shard.sealed:
                self._retire(key)
                shard = self._open[key] = new()
            return shard

    def _retire(self, key: tuple[str, int]) -> None:
        shard = self._open.pop(key, None)
        if shard is not None and not shard.written_out:
            self._full.append(shard)

    def due(self, now: float, closing: bool) -> Sequence[Task]:
        """Tasks that seal the shards whose time has come."""
        with self._lock:
            for key in [key for key, shard in self._open.items() if shard.sealed]:
                self._retire(key)
            self._full = [shard for shard in self._full if not shard.written_out]
            shards = [*self._open.values(), *self._full]
        return [_sealing(shard) for shard in shards if shard.is_due(now, closing)]


def _sealing(shard: Shard) -> Task:
    def seal() -> None:
        with shard.lock:
            shard.seal()

    return seal

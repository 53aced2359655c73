# SPDX-License-Identifier: Apache-2.0
"""The captured requests of one front end, until their results were fetched."""

import threading
from collections.abc import Callable
from time import monotonic

from vllm.v1.capture.frontend.path_locks import PathLocks
from vllm.v1.capture.frontend.tracking import Sample, Tracked
from vllm.v1.capture.frontend.unsent import UnsentRows
from vllm.v1.capture.types import CaptureResult

KEPT_RESULTS = 4096
"""Results of requests that nobody waited for are kept for this many requests."""

Owner = tuple[str, int]
"""`(parent, sample)`: the request as its client knows it, and which of its samples."""


class RequestTracker:
    """By parent: the id of the request that its client knows. Any thread may call."""

    def __init__(
        self,
        claims: PathLocks,
        stages: int,
        answered: Callable[[str, float], None],
        forgotten: Callable[[str], None],
    ) -> None:
        """Know of no request.

        Args:
            claims: names that requests give up when their results are there.
            stages: each instance answers once for each pipeline stage.
            answered: called when an instance has answered for a sample at all stages,
                with the seconds since the sample's end.
            forgotten: called with the parent of a request that is over.

        """
        self.claims = claims
        self.changed = threading.Condition()
        """Guards everything here; notified when all results of a request are there."""
        self.last_result = 0.0
        """When the last result of any request came, by the monotonic clock."""
        self._stages = stages
        self._answered = answered
        self._forgotten = forgotten
        self._unsent = UnsentRows()
        self._tracked: dict[str, Tracked] = {}
        self._owner: dict[str, Owner] = {}
        self._waiters: dict[str, list[Callable[[], None]]] = {}

    def begin(
        self, parent: str, sample: int, request_id: str, instances: tuple[str, ...]
    ) -> Tracked:
        """A sample is about to be sent to the engine; the lock is held."""
        tracked = self._tracked.setdefault(parent, Tracked())
        tracked.samples[sample] = Sample(instances, self._stages)
        tracked.request_ids.append(request_id)
        self._owner[request_id] = (parent, sample)
        return tracked

    def end(self, request_id: str, aborted: bool) -> Sample | None:
        """A sample has ended for its client; None if it is not captured."""
        with self.changed:
            owner = self._owner.get(request_id)
            if owner is None:
                return None
            tracked = self._tracked[owner[0]]
            tracked.aborted = tracked.aborted or aborted
            sample = tracked.samples[owner[1]]
            sample.ended_at = monotonic()
            return sample

    def abandon(self, parent: str) -> None:
        """Nobody comes for the results any more."""
        with self.changed:
            if parent in self._tracked:
                self._tracked[parent].aborted = True

    def owner_of(self, request_id: str) -> Owner | None:
        """Whose rows carry this id."""
        with self.changed:
            return self._owner.get(request_id)

    def note(
        self, request_id: str, instance: str, stage: int, result: CaptureResult
    ) -> None:
        """A result has come."""
        with self.changed:
            owner = self._owner.get(request_id)
            if owner is None:
                return
            parent, index = owner
            tracked = self._tracked[parent]
            self.last_result = monotonic()
            sample = tracked.samples[index]
            sample.results.setdefault(instance, {})[stage] = result
            if len(sample.results[instance]) == self._stages:
                self._answered(instance, monotonic() - sample.ended_at)
            if tracked.complete():
                self.claims.release(parent)
                for wake in self._waiters.pop(parent, []):
                    wake()
                self.changed.notify_all()
                self._drop_oldest()

    def results(self, parent: str, request_id: str) -> dict[str, CaptureResult] | None:
        """What is known by now; a request whose results are all there is over."""
        with self.changed:
            tracked = self._tracked.get(parent)
            if tracked is None:
                return None
            if tracked.complete():
                self._forget(parent)
                self._unsent.hold(tracked.held)
            return tracked.merged(request_id)

    def is_complete(self, parent: str) -> bool:
        """Whether no result is missing."""
        tracked = self._tracked.get(parent)
        return tracked is None or tracked.complete()

    def waits(self, parent: str) -> bool:
        """Whether the last output waits for results without being asked to."""
        with self.changed:
            tracked = self._tracked.get(parent)
            return tracked is not None and tracked.waits

    def when_complete(self, parent: str, wake: Callable[[], None]) -> None:
        """Call `wake`, from any thread, with the last result; not if it is there."""
        with self.changed:
            if not self.is_complete(parent):
                self._waiters.setdefault(parent, []).append(wake)

    def lose(self, parent: str, why: str) -> None:
        """Results that have not come will not."""
        with self.changed:
            for sample in self._tracked[parent].samples.values():
                sample.lose(why, self._stages)

    def count(self) -> int:
        """How many wait for results; complete ones may wait to be fetched."""
        with self.changed:
            return sum(not tracked.complete() for tracked in self._tracked.values())

    def held_bytes(self, instance: str, aborted: bool) -> int:
        """Bytes that the requests may bring back; the lock is held.

        Those that lie in responses count with the requests that were not aborted.
        """
        held = sum(
            tracked.held.get(instance, 0)
            for tracked in self._tracked.values()
            if tracked.aborted == aborted
        )
        return held if aborted else held + self._unsent.bytes_for(instance)

    def forget_aborted(self, instance: str, size: int) -> None:
        """Forget results that nobody may come for, until `size` bytes are free."""
        for parent, tracked in list(self._tracked.items()):
            if size <= 0:
                return
            if tracked.aborted and tracked.held.get(instance) and tracked.complete():
                size -= tracked.held[instance]
                self._forget(parent)

    def _drop_oldest(self) -> None:
        """Forget complete results that nobody has fetched, oldest first."""
        while len(self._tracked) > KEPT_RESULTS:
            items = self._tracked.items()
            oldest = next((parent for parent, one in items if one.complete()), None)
            if oldest is None:
                return
            self._forget(oldest)

    def _forget(self, parent: str) -> None:
        self.claims.release(parent)
        tracked = self._tracked.pop(parent, None)
        self._forgotten(parent)
        for request_id in () if tracked is None else tracked.request_ids:
            del self._owner[request_id]

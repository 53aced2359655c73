# SPDX-License-Identifier: Apache-2.0
"""Tracks the captured requests of one front end until their results are fetched."""

import asyncio
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.v1.capture.frontend.path_locks import PathLocks
from vllm.v1.capture.frontend.streaming import LiveRequest
from vllm.v1.capture.frontend.unsent import when_response_ends
from vllm.v1.capture.groups import GroupChunk
from vllm.v1.capture.results import merge, merge_samples, request_key
from vllm.v1.capture.types import CaptureResult
from vllm.v1.residual.capture_plan import CapturePlan
from vllm.v1.residual.spans import Spans

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

logger = init_logger(__name__)


@dataclass
class Sample:
    """The results of one sample, by instance and pipeline stage."""

    instances: tuple[str, ...]
    stages: int
    results: dict[str, dict[int, CaptureResult]] = field(default_factory=dict)
    ended_at: float = 0.0
    """Monotonic time at which the output for its client was complete, in seconds."""
    plan: CapturePlan | None = None
    counts_cached: bool = False
    """Whether there is an activation store."""
    kept: dict[str, int] = field(default_factory=dict)
    """The number of rows that were kept, by instance with `keep_when`."""
    cached: dict[str, int] = field(default_factory=dict)
    """The number of rows from the activation store, if there is one, by instance."""

    def note_rows(self, kept: Mapping[str, Spans], stop: int, cached: int) -> None:
        """Count the rows of an ended sample.

        Args:
            kept: the positions that are kept, by instance with `keep_when`.
            stop: the position after the last row.
            cached: how many tokens the prefix cache had. Of those that are captured,
                the activation store has had the rows.

        """
        if self.plan is not None:
            for name, spans in kept.items():
                self.kept[name] = self.plan.kept_rows(name, spans, stop)
            for name in self.plan.instances if self.counts_cached else ():
                self.cached[name] = self.plan.kept_rows(name, ((0, cached),), stop)

    def complete(self) -> bool:
        """Whether every instance has returned a result for every stage."""
        return all(
            len(self.results.get(name, ())) == self.stages for name in self.instances
        )

    def lose(self, why: str) -> None:
        """Replace missing results by errors with the message `why`."""
        for name in self.instances:
            got = self.results.setdefault(name, {})
            for stage in range(self.stages):
                got.setdefault(stage, CaptureResult(request_key(""), "error", why))

    def merged(self, request_id: str) -> dict[str, CaptureResult]:
        """The result of each instance over all stages; pending if one is missing."""
        merged = {}
        for name in self.instances:
            got = self.results.get(name, {})
            if len(got) < self.stages:
                merged[name] = CaptureResult(request_key(request_id), "pending")
            else:
                merged[name] = merge(request_id, [got[s] for s in sorted(got)])
                merged[name].kept = self.kept.get(name)
                merged[name].cached_rows = self.cached.get(name)
        return merged


@dataclass
class Tracked:
    """A client's request with its samples."""

    samples: dict[int, Sample] = field(default_factory=dict)
    request_ids: list[str] = field(default_factory=list)
    """Internal ids of the samples."""
    client_id: str = ""
    """The id that the client has given the request."""
    held: Mapping[str, int] = field(default_factory=dict)
    """Bytes of rows that may be returned with the results, by instance."""
    waits: bool = False
    """Whether the final output waits for results because a consumer requires it."""
    idle: tuple[str, ...] = ()
    """Instances that the request names but that capture nothing of it."""
    aborted: bool = False
    """Whether a sample was aborted; then the results may never be fetched."""
    unread: bool = False
    """Whether its HTTP response has ended; then nobody can fetch the results."""
    live: LiveRequest | None = None
    """The rows for its intermediate outputs, if these carry any."""

    def complete(self) -> bool:
        """Whether all results of all samples have arrived."""
        return all(sample.complete() for sample in self.samples.values())

    def merged(self, request_id: str) -> dict[str, CaptureResult]:
        """The result of each instance, merged over the samples."""
        each = {
            index: sample.merged(request_id) for index, sample in self.samples.items()
        }
        if len(each) == 1:
            results = next(iter(each.values()))
        else:
            names = sorted({name for results in each.values() for name in results})
            results = {
                name: merge_samples(
                    request_id, {index: each[index][name] for index in sorted(each)}
                )
                for name in names
            }
        key = request_key(request_id)
        idle = {name: CaptureResult(key, "not_requested") for name in self.idle}
        return results | idle


class HeldBytes:
    """Bytes that requests may return, by instance, as running sums; thread-safe.

    A request is `reserved` once it was admitted, then `running` or `aborted`, and then
    its response is `unsent`. Prompts are processed on several threads, so others may be
    admitted between its admission and its start. Every admission reads the sums, so
    they are not computed over all requests each time.
    """

    def __init__(self) -> None:
        self._states: dict[Hashable, tuple[str, Mapping[str, int]]] = {}
        self._sums: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._lock = threading.RLock()  # A finalizer that drops may run anywhere.

    def of(self, instance: str, *states: str) -> int:
        """The sum over the requests in some states."""
        return sum([self._sums[state][instance] for state in states])

    def put(self, key: Hashable, state: str, sizes: Mapping[str, int]) -> None:
        """Set the state and the bytes of a request, by any key of it."""
        with self._lock:
            self.drop(key)
            self._states[key] = state, sizes
            self._sums[state].update(sizes)

    def drop(self, key: Hashable) -> None:
        """Remove a request, if it is there."""
        with self._lock:
            state, sizes = self._states.pop(key, ("", {}))
            self._sums[state].subtract(sizes)

    def put_until_sent(self, sizes: Mapping[str, int]) -> None:
        """Count bytes until the current response has ended; outside of one, do not."""
        key = object()
        if when_response_ends(lambda: self.drop(key)):
            self.put(key, "unsent", sizes)


KEPT_RESULTS = 4096
"""Maximum number of tracked requests before complete, unfetched ones are dropped."""

Owner = tuple[str, int]
"""`(parent, sample)`: the id of the client's request, and the sample's index."""


class RequestTracker:
    """Captured requests by parent id: the id of the request before it is split by `n`.

    Thread-safe; methods that need the caller to hold `lock` say so.
    """

    def __init__(
        self,
        claims: PathLocks,
        stages: int,
        answered: Callable[[str, float], None],
    ) -> None:
        """Start with no requests.

        Args:
            claims: the locked paths; those of a request are released when its results
                are complete.
            stages: number of pipeline stages; an instance returns a result for each.
            answered: called with an instance and the seconds since the end of a sample,
                when it has returned the sample's results of all stages.

        """
        self.claims = claims
        self.lock = threading.RLock()
        """Guards all state."""
        self.last_result = 0.0
        """Monotonic time, in seconds, at which the last result arrived."""
        self._stages = stages
        self._answered = answered
        self.held = HeldBytes()
        """What requests may return, tracked ones by their parent id."""
        self._tracked: dict[str, Tracked] = {}
        self._owner: dict[str, Owner] = {}
        self._waiters: dict[str, list[Future[None]]] = {}

    def begin(
        self, parent: str, sample: int, request_id: str, instances: tuple[str, ...]
    ) -> Tracked:
        """Track a sample that is about to be sent; the caller holds `lock`."""
        tracked = self._tracked.setdefault(parent, Tracked())
        tracked.samples[sample] = Sample(instances, self._stages)
        tracked.request_ids.append(request_id)
        self._owner[request_id] = (parent, sample)
        return tracked

    def end(self, request_id: str, aborted: bool) -> Sample | None:
        """Mark a sample as ended and return it; None if it is not captured."""
        with self.lock:
            owner = self._owner.get(request_id)
            if owner is None:
                return None
            tracked = self._tracked[owner[0]]
            if aborted:
                self.abandon(owner[0])
            sample = tracked.samples[owner[1]]
            sample.ended_at = monotonic()
            return sample

    def abandon(self, parent: str) -> None:
        """Mark a request as aborted: its results will not be fetched."""
        with self.lock:
            if (tracked := self._tracked.get(parent)) is not None:
                tracked.aborted = True
                self.held.put(parent, "aborted", tracked.held)

    def discard(self, parent: str) -> None:
        """Forget a request whose HTTP response has ended once it is complete."""
        with self.lock:
            self.abandon(parent)
            if (tracked := self._tracked.get(parent)) is not None:
                tracked.unread = True
                if tracked.complete():
                    self._forget(parent)

    def hold(self, parent: str, sizes: Mapping[str, int]) -> None:
        """Count what a request may return, by instance; the caller holds `lock`."""
        tracked = self._tracked[parent]
        tracked.held = sizes
        self.held.put(parent, "aborted" if tracked.aborted else "running", sizes)

    def put_live(self, rows: GroupChunk) -> None:
        """Add rows for intermediate outputs; after the final one they are dropped."""
        with self.lock:
            parent, sample = self._owner.get(rows.request_id, ("", 0))
            tracked = self._tracked.get(parent)
            if tracked is not None and tracked.live is not None:
                tracked.live.put(sample, [rows])

    def show_live(self, parent: str, output: "RequestOutput") -> None:
        """Attach the rows so far to an intermediate output; the final one has all."""
        with self.lock:
            tracked = self._tracked.get(parent)
            if tracked is None or tracked.live is None:
                return
            if output.finished:
                tracked.live = None
            else:
                output.capture_results = tracked.live.show(output)

    def note(
        self, request_id: str, instance: str, stage: int, result: CaptureResult
    ) -> None:
        """Store a result that arrived; the last one of a request wakes its waiters."""
        with self.lock:
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
                for done in self._waiters.pop(parent, []):
                    done.set_result(None)
                if tracked.unread:
                    self._forget(parent)
                self._drop_oldest()

    def results(self, parent: str, request_id: str) -> dict[str, CaptureResult] | None:
        """The results so far, by instance; a complete request is then forgotten."""
        with self.lock:
            tracked = self._tracked.get(parent)
            if tracked is None:
                return None
            if tracked.complete():
                self._forget(parent)
                if tracked.held:
                    self.held.put_until_sent(tracked.held)
            return tracked.merged(request_id)

    def named(self, client_id: str) -> str | None:
        """The parent id of the last request with a client's id; None if unknown."""
        with self.lock:
            items = reversed(self._tracked.items())
            return next((p for p, one in items if one.client_id == client_id), None)

    def is_complete(self, parent: str) -> bool:
        """Whether no result is missing, or the request is unknown."""
        tracked = self._tracked.get(parent)
        return tracked is None or tracked.complete()

    def waits(self, parent: str) -> bool:
        """Whether a consumer makes the final output wait for results."""
        with self.lock:
            tracked = self._tracked.get(parent)
            return tracked is not None and tracked.waits

    def completion(self, parent: str) -> "Future[None]":
        """Becomes done when the last result arrives."""
        done = Future[None]()
        with self.lock:
            if self.is_complete(parent):
                done.set_result(None)
            else:
                self._waiters.setdefault(parent, []).append(done)
        return done

    def lose(self, parent: str, why: str) -> None:
        """Replace missing results by errors with the message `why`."""
        with self.lock:
            for sample in self._tracked[parent].samples.values():
                sample.lose(why)

    def count(self) -> int:
        """The number of requests whose results are incomplete."""
        with self.lock:
            return sum(not tracked.complete() for tracked in self._tracked.values())

    def forget_aborted(self, instance: str, size: int) -> None:
        """Forget complete results of aborted requests until `size` bytes are free.

        Their client may never fetch them. The caller holds `lock`.
        """
        for parent, tracked in list(self._tracked.items()) if size > 0 else ():
            if size <= 0:
                return
            if tracked.aborted and tracked.held.get(instance) and tracked.complete():
                size -= tracked.held[instance]
                self._forget(parent)

    def _drop_oldest(self) -> None:
        """Bound the number of requests: forget unfetched results, oldest first."""
        while len(self._tracked) > KEPT_RESULTS:
            items = self._tracked.items()
            oldest = next((parent for parent, one in items if one.complete()), None)
            if oldest is None:
                return
            self._forget(oldest)

    def _forget(self, parent: str) -> None:
        self.claims.release(parent)
        self._waiters.pop(parent, None)
        tracked = self._tracked.pop(parent, None)
        if tracked is not None:
            self.held.drop(parent)
            for request_id in tracked.request_ids:
                del self._owner[request_id]


WAIT_SECONDS = 120.0
"""A wait ends if no result of any request has arrived for this many seconds."""

LOOK_SECONDS = 1.0
"""Seconds between checks, while waiting, that the engine is alive."""


class ResultWaiter:
    """Waits until the results of a request are complete or can no longer arrive."""

    def __init__(self, requests: RequestTracker, alive: Callable[[], bool]) -> None:
        """Wait for results of `requests` while `alive()` is true."""
        self._requests = requests
        self._alive = alive

    def wait(self, parent: str) -> None:
        """Wait for the results of a request, blocking this thread."""
        done, began = self._requests.completion(parent), monotonic()
        while self._may_complete(parent, began):
            wait([done], LOOK_SECONDS)

    async def wait_async(self, parent: str) -> None:
        """Wait for the results of a request, without blocking the event loop."""
        done, began = self._requests.completion(parent), monotonic()
        woken = asyncio.wrap_future(done)
        while self._may_complete(parent, began):
            await asyncio.wait([woken], timeout=LOOK_SECONDS)

    def _may_complete(self, parent: str, began: float) -> bool:
        """Whether results are missing and may still arrive."""
        if self._requests.is_complete(parent):
            return False
        if not self._alive():
            self._requests.lose(
                parent, "the engine died before the consumer had answered"
            )
            return False
        # Results of other requests count as progress: with many requests and a slow
        # disk, each takes long.
        if monotonic() - max(began, self._requests.last_result) < WAIT_SECONDS:
            return True
        logger.warning(
            "Capture results of %s have not arrived within %.0f s", parent, WAIT_SECONDS
        )
        return False

# SPDX-License-Identifier: Apache-2.0
"""State of a captured request in the front end: its ends, and which results arrived."""

import threading
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.capture.results import merge, merge_samples
from vllm.v1.capture.types import CaptureResult
from vllm.v1.residual.capture_plan import CapturePlan
from vllm.v1.residual.spans import Spans


@dataclass
class Sample:
    """The results of one sample, by instance and pipeline stage."""

    instances: tuple[str, ...]
    stages: int
    results: dict[str, dict[int, CaptureResult]] = field(default_factory=dict)
    ended_at: float = 0.0
    """Monotonic time at which the output for its client was complete, in seconds."""
    plan: CapturePlan | None = None
    kept: dict[str, int] = field(default_factory=dict)
    """The number of rows that were kept, by instance with `keep_when`."""

    def note_kept(self, kept: Mapping[str, Spans], stop: int) -> None:
        """Count the kept rows of an ended sample, whose last row is at `stop - 1`."""
        if self.plan is not None:
            for name, spans in kept.items():
                self.kept[name] = self.plan.kept_rows(name, spans, stop)

    def complete(self) -> bool:
        """Whether every instance has returned a result for every stage."""
        return all(
            len(self.results.get(name, ())) == self.stages for name in self.instances
        )

    def lose(self, why: str) -> None:
        """Replace missing results by errors with the message `why`."""
        key: Any = ("", -1, "*")
        for name in self.instances:
            got = self.results.setdefault(name, {})
            for stage in range(self.stages):
                got.setdefault(stage, CaptureResult(key, "error", why))

    def merged(self, request_id: str) -> dict[str, CaptureResult]:
        """The result of each instance over all stages; pending if one is missing."""
        merged = {}
        for name in self.instances:
            got = self.results.get(name, {})
            if len(got) < self.stages:
                key: Any = (request_id, -1, "*")
                merged[name] = CaptureResult(key, "pending")
            else:
                merged[name] = merge(request_id, [got[s] for s in sorted(got)])
                merged[name].kept = self.kept.get(name)
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
        key: Any = (request_id, -1, "*")
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

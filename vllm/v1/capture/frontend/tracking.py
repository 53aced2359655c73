# SPDX-License-Identifier: Apache-2.0
"""Which results of a captured request have come to its front end."""

from dataclasses import dataclass, field
from typing import Any

from vllm.v1.capture.results import merge, merge_samples
from vllm.v1.capture.types import CaptureResult


@dataclass
class Sample:
    """What is known of one sample's results: per instance, per stage."""

    instances: tuple[str, ...]
    stages: int
    results: dict[str, dict[int, CaptureResult]] = field(default_factory=dict)
    ended_at: float = 0.0
    """When its client's output was complete, by the monotonic clock."""

    def complete(self) -> bool:
        """Whether every instance has answered, at every stage."""
        return all(
            len(self.results.get(name, ())) == self.stages for name in self.instances
        )

    def lose(self, why: str, stages: int) -> None:
        """Results that have not come will not."""
        key: Any = ("", -1, "*")
        for name in self.instances:
            got = self.results.setdefault(name, {})
            for stage in range(stages):
                got.setdefault(stage, CaptureResult(key, "error", why))

    def merged(self, request_id: str) -> dict[str, CaptureResult]:
        """The result of each instance, pending where a stage has not answered."""
        merged = {}
        for name in self.instances:
            got = self.results.get(name, {})
            if len(got) < self.stages:
                key: Any = (request_id, -1, "*")
                merged[name] = CaptureResult(key, "pending")
            else:
                merged[name] = merge(request_id, [got[s] for s in sorted(got)])
        return merged


@dataclass
class Tracked:
    """A request as the client knows it: one id, one or more samples."""

    samples: dict[int, Sample] = field(default_factory=dict)
    request_ids: list[str] = field(default_factory=list)
    """What the engine calls the samples."""
    held: dict[str, int] = field(default_factory=dict)
    """Bytes of rows that may come back with the results, per instance."""
    waits: bool = False
    """Whether a consumer's rows come back with the output, which waits for them."""
    idle: tuple[str, ...] = ()
    """Instances that the request names and that want nothing of it."""
    aborted: bool = False
    """Whether it may be that nobody comes for the results."""

    def complete(self) -> bool:
        """Whether every result of every sample is there."""
        return all(sample.complete() for sample in self.samples.values())

    def merged(self, request_id: str) -> dict[str, CaptureResult]:
        """The result of each instance, joined over the samples."""
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

# SPDX-License-Identifier: Apache-2.0
"""Counters of all lanes as the front end knows them, for metrics and `describe`."""

import threading
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from vllm.v1.capture.frontend.metrics import CaptureMetrics
from vllm.v1.capture.stats import TOTALS, LaneCounters, added
from vllm.v1.capture.transport.zmq_channel import CountersMessage
from vllm.v1.residual.capture_plan import LIVE
from vllm.v1.residual.readout_plan import ReadoutCounters

Source = tuple[int, int]
"""`(engine, pipeline stage)`: a worker that reports."""


class CaptureStatus:
    """Counters by engine, stage and consumer instance.

    A driver-side consumer has a lane in each worker, which sends its rows, and one in
    this process, which counts failures and queued work.
    """

    def __init__(self, here: Callable[[], Mapping[str, LaneCounters]]) -> None:
        """Start without reports.

        Args:
            here: returns the counters of the lanes in this process.

        """
        self._here = here
        self._reports: dict[Source, CountersMessage] = {}
        """The last report of each worker."""
        self._failed_here: dict[str, int] = {}
        self._metrics: CaptureMetrics | None = None
        self._lock = threading.Lock()

    def publish(self, metrics: CaptureMetrics) -> None:
        """Forward later reports to `metrics`."""
        self._metrics = metrics

    def take(self, message: CountersMessage) -> None:
        """Store the report of a worker."""
        source = (message.engine, message.stage)
        with self._lock:
            before = self._reports.get(source, CountersMessage(*source, {}, 0))
            self._reports[source] = message
            if self._metrics is not None and message.adds:
                self._add(self._metrics, message, before)
                self._set_levels(self._metrics, message.engine)

    def finalized(self, instance: str, seconds: float) -> None:
        """Record the time from the end of a request to the consumer's result."""
        if self._metrics is not None:
            self._metrics.finalized((0, instance), seconds)

    def kept(self, instance: str, rows: int) -> None:
        """Count the rows of a request that `keep_when` has kept."""
        if self._metrics is not None:
            self._metrics.kept((0, instance), rows)

    def num_workers(self) -> int:
        """The number of workers that have reported."""
        with self._lock:
            return len(self._reports)

    def counters(self) -> dict[str, Any]:
        """Counters by consumer instance, summed over all engines and stages."""
        with self._lock:
            found = {name: self._sum(name) for name in self._names()}
            reforwarded = sum(one.reforwarded for one in self._reports.values())
        for name, own in self._here().items():
            found[name] = _with_here(found.get(name, LaneCounters()), own)
        return {
            "consumers": {
                name: msgspec.structs.asdict(found[name])
                for name in sorted(found)
                if name != LIVE
            },
            "reforwarded_tokens": reforwarded,
        }

    def host_memory(self) -> list[dict[str, Any]]:
        """The fields of `MemoryCounters` for each worker."""
        with self._lock:
            found = sorted(self._reports.items())
        return [
            {
                "engine": engine,
                "stage": stage,
                **msgspec.structs.asdict(report.memory),
                "held_bytes": report.memory.held_bytes,
            }
            for (engine, stage), report in found
        ]

    def _names(self) -> set[str]:
        return {name for one in self._reports.values() for name in one.counters}

    def _sum(self, name: str, engine: int | None = None) -> LaneCounters:
        return added(
            one.counters[name]
            for one in self._reports.values()
            if name in one.counters and engine in (None, one.engine)
        )

    def _add(
        self,
        metrics: CaptureMetrics,
        message: CountersMessage,
        before: CountersMessage,
    ) -> None:
        for name, counters in message.counters.items():
            grown = _difference(counters, before.counters.get(name, LaneCounters()))
            if name != LIVE:
                metrics.add((message.engine, name), grown)
        metrics.add_reforwarded(
            message.engine, message.reforwarded - before.reforwarded
        )
        for kind, now in message.readouts.items():
            was = before.readouts.get(kind, ReadoutCounters())
            more = ReadoutCounters(now.rows - was.rows, now.seconds - was.seconds)
            metrics.add_readouts(message.engine, kind, more)
        for name, own in self._here().items():
            failed = own.failed_rows - self._failed_here.get(name, 0)
            self._failed_here[name] = own.failed_rows
            metrics.add((message.engine, name), LaneCounters(failed_rows=failed))

    def _set_levels(self, metrics: CaptureMetrics, engine: int) -> None:
        here = self._here()
        for name in self._names() - {LIVE}:
            counters = self._sum(name, engine)
            if name in here:
                counters = _with_here(counters, here[name])
            metrics.set_levels((engine, name), counters)


def _difference(now: LaneCounters, before: LaneCounters) -> LaneCounters:
    return LaneCounters(
        **{name: getattr(now, name) - getattr(before, name) for name in TOTALS}
    )


def _with_here(workers: LaneCounters, here: LaneCounters) -> LaneCounters:
    """Add the failures and queues of this process; rows were counted by workers."""
    return msgspec.structs.replace(
        workers,
        failed_rows=workers.failed_rows + here.failed_rows,
        queue_depth=workers.queue_depth + here.queue_depth,
        queue_bytes=workers.queue_bytes + here.queue_bytes,
    )

# SPDX-License-Identifier: Apache-2.0
"""Counters of all lanes as the front end knows them, for metrics and `describe`."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
from prometheus_client import Counter, Gauge, Histogram

from vllm.v1.capture.stats import LEVELS, TOTALS, LaneCounters, added
from vllm.v1.capture.transport.zmq_channel import CountersMessage
from vllm.v1.residual.capture_plan import LIVE
from vllm.v1.residual.readout_plan import ReadoutCounters

Place: TypeAlias = tuple[int, str]
"""`(engine, consumer instance)`."""

_TEXTS = {
    "rows": "Rows (one token at one hook point) delivered to the consumer.",
    "bytes": "Bytes of rows delivered to the consumer.",
    "spilled_rows": "Rows that were spilled to disk because the consumer was too slow.",
    "spilled_bytes": "Bytes that were spilled to disk because the consumer was too "
    "slow.",
    "rewritten_bytes": "Bytes that a storage consumer spilled, and so wrote twice.",
    "dropped_rows": "Rows dropped because the consumer was too slow.",
    "failed_rows": "Rows of captures whose result is an error.",
    "requests": "Captured requests for which the consumer has returned a result.",
    "queue_depth": "Packets of rows and ends of requests that are waiting.",
    "queue_bytes": "Bytes of rows that are waiting in memory.",
    "spill_bytes": "Bytes of rows that are waiting on disk.",
}

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0)


class CaptureMetrics:
    """The metrics of one front end, labelled by model, engine and consumer."""

    def __init__(
        self, model: str, engines: Sequence[int], instances: Sequence[str]
    ) -> None:
        """Register the metrics; names of an earlier engine must be unregistered."""
        labels = ["model_name", "engine", "consumer"]
        self._model = model
        self._totals = {
            name: Counter(f"vllm:capture_{name}", _TEXTS[name], labels)
            for name in TOTALS
        }
        self._levels = {
            name: Gauge(
                f"vllm:capture_{name}",
                _TEXTS[name],
                labels,
                multiprocess_mode="mostrecent",
            )
            for name in LEVELS
        }
        self._finalize = Histogram(
            "vllm:capture_finalize_seconds",
            "Seconds from the end of a request to the consumer's result.",
            labels,
            buckets=_SECONDS,
        )
        self._kept = Counter(
            "vllm:capture_kept_rows",
            "Rows of captures with keep_when that were kept.",
            labels,
        )
        self._cached = Counter(
            "vllm:capture_cached_rows",
            "Rows of captures that the activation store had.",
            labels,
        )
        self._reforwarded = Counter(
            "vllm:capture_reforwarded_tokens",
            "Cached prompt tokens that were recomputed for their rows.",
            labels[:2],
        )
        readouts = ["model_name", "engine", "kind"]
        self._readout_rows = Counter(
            "vllm:readout_rows", "Rows that were read out on the device.", readouts
        )
        self._readout_seconds = Counter(
            "vllm:readout_seconds",
            "CPU seconds that workers spent on queueing readouts.",
            readouts,
        )
        for engine in engines:
            self._reforwarded.labels(model, str(engine))
            for instance in instances:
                self.add((engine, instance), LaneCounters())
                self.set_levels((engine, instance), LaneCounters())
        for instance in instances:
            self._finalize.labels(model, str(engines[0]), instance)
            self._kept.labels(model, str(engines[0]), instance)
            self._cached.labels(model, str(engines[0]), instance)

    def add(self, place: Place, grown: LaneCounters) -> None:
        """Increase the totals by the fields of `grown`."""
        for name, counter in self._totals.items():
            counter.labels(*self._labels(place)).inc(getattr(grown, name))

    def set_levels(self, place: Place, counters: LaneCounters) -> None:
        """Set the gauges to the current values."""
        for name, gauge in self._levels.items():
            gauge.labels(*self._labels(place)).set(getattr(counters, name))

    def add_reforwarded(self, engine: int, tokens: int) -> None:
        """Count `tokens` more prompt tokens as recomputed."""
        self._reforwarded.labels(self._model, str(engine)).inc(tokens)

    def add_readouts(self, engine: int, kind: str, grown: ReadoutCounters) -> None:
        """Increase the totals of a kind of readout by the fields of `grown`."""
        labels = self._model, str(engine), kind
        self._readout_rows.labels(*labels).inc(grown.rows)
        self._readout_seconds.labels(*labels).inc(grown.seconds)

    def finalized(self, place: Place, seconds: float) -> None:
        """Record the time from the end of a request to the consumer's result."""
        self._finalize.labels(*self._labels(place)).observe(seconds)

    def kept(self, place: Place, rows: int) -> None:
        """Count rows that `keep_when` has kept."""
        self._kept.labels(*self._labels(place)).inc(rows)

    def cached(self, place: Place, rows: int) -> None:
        """Count rows that the activation store had."""
        self._cached.labels(*self._labels(place)).inc(rows)

    def _labels(self, place: Place) -> tuple[str, str, str]:
        return self._model, str(place[0]), place[1]


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

    def note_rows(self, kept: Mapping[str, int], cached: Mapping[str, int]) -> None:
        """Count a request's rows by instance: kept by `keep_when`, and stored ones."""
        if self._metrics is not None:
            for instance, rows in kept.items():
                self._metrics.kept((0, instance), rows)
            for instance, rows in cached.items():
                self._metrics.cached((0, instance), rows)

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

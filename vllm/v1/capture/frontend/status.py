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
    "kept_rows": "Rows of captures with keep_when that were kept.",
    "cached_rows": "Rows of captures that the activation store had.",
    "queue_depth": "Packets of rows and ends of requests that are waiting.",
    "queue_bytes": "Bytes of rows that are waiting in memory.",
    "spill_bytes": "Bytes of rows that are waiting on disk.",
}

COUNTED_HERE = ("kept_rows", "cached_rows")
"""Totals that the front end counts, of all engines together."""

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
            for name in (*TOTALS, *COUNTED_HERE)
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
                self.add((engine, instance), dict.fromkeys(TOTALS, 0))
                self.set_levels((engine, instance), LaneCounters())
        for instance in instances:
            self._finalize.labels(model, str(engines[0]), instance)
            self.add((engines[0], instance), dict.fromkeys(COUNTED_HERE, 0))

    def add(self, place: Place, grown: Mapping[str, int]) -> None:
        """Increase totals, by their names."""
        for name, amount in grown.items():
            self._totals[name].labels(*self._labels(place)).inc(amount)

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
            for name, counted in zip(COUNTED_HERE, (kept, cached)):
                for instance, rows in counted.items():
                    self._metrics.add((0, instance), {name: rows})

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
            was = before.counters.get(name, LaneCounters())
            if name != LIVE:
                grown = {n: getattr(counters, n) - getattr(was, n) for n in TOTALS}
                metrics.add((message.engine, name), grown)
        metrics.add_reforwarded(
            message.engine, message.reforwarded - before.reforwarded
        )
        for kind, now in message.readouts.items():
            seen = before.readouts.get(kind, ReadoutCounters())
            more = ReadoutCounters(now.rows - seen.rows, now.seconds - seen.seconds)
            metrics.add_readouts(message.engine, kind, more)
        for name, own in self._here().items():
            failed = own.failed_rows - self._failed_here.get(name, 0)
            self._failed_here[name] = own.failed_rows
            metrics.add((message.engine, name), {"failed_rows": failed})

    def _set_levels(self, metrics: CaptureMetrics, engine: int) -> None:
        here = self._here()
        for name in self._names() - {LIVE}:
            counters = self._sum(name, engine)
            if name in here:
                counters = _with_here(counters, here[name])
            metrics.set_levels((engine, name), counters)


def _with_here(workers: LaneCounters, here: LaneCounters) -> LaneCounters:
    """Add the failures and queues of this process; rows were counted by workers."""
    return msgspec.structs.replace(
        workers,
        failed_rows=workers.failed_rows + here.failed_rows,
        queue_depth=workers.queue_depth + here.queue_depth,
        queue_bytes=workers.queue_bytes + here.queue_bytes,
    )

# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics of capture."""

from collections.abc import Sequence
from typing import TypeAlias

from prometheus_client import Counter, Gauge, Histogram

from vllm.v1.capture.stats import LEVELS, TOTALS, LaneCounters
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

    def _labels(self, place: Place) -> tuple[str, str, str]:
        return self._model, str(place[0]), place[1]

# SPDX-License-Identifier: Apache-2.0
"""Reports a worker's counters to the front ends, about once a second."""

import threading
from collections.abc import Callable, Mapping
from itertools import count

import msgspec

from vllm.logger import init_logger
from vllm.v1.capture.delivery.consumer_thread import SinkLane
from vllm.v1.capture.memory.budget import BUDGET, collect_all
from vllm.v1.capture.memory.buffer_pool import ROWS
from vllm.v1.capture.stats import MemoryCounters
from vllm.v1.capture.transport.zmq_channel import CountersMessage, Outbox
from vllm.v1.residual.readout_plan import ReadoutCounters

logger = init_logger(__name__)

PERIOD_SECONDS = 1.0
TRIM_PERIODS = 60
"""Number of periods after which unused memory is returned to the system."""


class Reporter:
    """Checks the lanes of a worker for stalls and reports their counters.

    Reports go to every front end that has sent a captured request, or has asked for
    them. Only the first of them adds the counters to its Prometheus metrics, because
    these are summed over front ends.
    """

    def __init__(
        self,
        engine: int,
        stage: int,
        lanes: Mapping[str, SinkLane],
        outbox: Outbox,
        trim: Callable[[], None] = lambda: None,
        readouts: Mapping[str, ReadoutCounters] | None = None,
    ) -> None:
        """Start the reporting thread.

        Args:
            engine: data-parallel index of this worker's engine.
            stage: its pipeline stage.
            lanes: the lanes of this worker, by instance.
            outbox: sends the reports.
            trim: returns unused memory to the system.
            readouts: counters of readouts by kind, which the engine's thread updates.

        """
        self._trim = trim
        self._readouts = {} if readouts is None else readouts
        self._engine = engine
        self._stage = stage
        self._lanes = lanes
        self._outbox = outbox
        self.addresses: dict[str, bool] = {}
        """Front ends in order of registration; whether each has the latest counters."""
        self._said: bytes = b""
        self._reforwarded = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="capture-report", daemon=True
        )
        self._thread.start()

    def add_reforwarded(self, tokens: int) -> None:
        """Count cached prompt tokens that are recomputed because they are captured."""
        self._reforwarded += tokens

    def close(self) -> None:
        """Stop, and report the final counters."""
        self._closing.set()
        self._thread.join(timeout=5)
        self.report()

    def report(self) -> None:
        """Send the counters to each front end that does not have the current values."""
        counters = {name: lane.counters() for name, lane in self._lanes.items()}
        message = CountersMessage(
            self._engine,
            self._stage,
            counters,
            self._reforwarded,
            memory=self._memory(),
            readouts=dict(self._readouts),
        )
        now = msgspec.msgpack.encode(message)
        changed, self._said = now != self._said, now
        for number, (address, knows) in enumerate(list(self.addresses.items())):
            if changed or not knows:
                message.adds = number == 0
                self._outbox.send(address, message)
                self.addresses[address] = True

    def _memory(self) -> MemoryCounters:
        """The host memory that this process holds for rows or has lent."""
        return MemoryCounters(
            BUDGET.limit,
            BUDGET.by_owner(),
            BUDGET.overflow_bytes,
            **self._outbox.lent(),
        )

    def _run(self) -> None:
        for period in count(1):
            if self._closing.wait(PERIOD_SECONDS):
                return
            try:
                for lane in self._lanes.values():
                    lane.check()
                collect_all()
                self.report()
                if period % TRIM_PERIODS == 0:
                    ROWS.trim()
                    self._trim()
            except Exception:
                # Failing to report must not stop the worker; the next may succeed.
                logger.exception("The counters of captures could not be reported")

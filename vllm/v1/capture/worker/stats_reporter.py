# SPDX-License-Identifier: Apache-2.0
"""A worker's counters, told to the front ends about once a second."""

import threading
from collections.abc import Callable, Mapping
from itertools import count

import msgspec

from vllm.logger import init_logger
from vllm.v1.capture.delivery.consumer_thread import SinkLane
from vllm.v1.capture.memory.budget import BUDGET
from vllm.v1.capture.memory.buffer_pool import ROWS
from vllm.v1.capture.memory.reclaim import collect_all
from vllm.v1.capture.stats import MemoryCounters
from vllm.v1.capture.transport.zmq_channel import CountersMessage, Outbox

logger = init_logger(__name__)

PERIOD_SECONDS = 1.0
TRIM_PERIODS = 60
"""Periods after which memory that was not needed meanwhile is given back."""


class Reporter:
    """Looks after the lanes of a worker, and says how they are doing.

    Every front end that has had a captured request, or has asked for it, hears of all
    counters, and the first one also adds them to its metrics: these are summed over
    front ends.
    """

    def __init__(
        self,
        engine: int,
        stage: int,
        lanes: Mapping[str, SinkLane],
        outbox: Outbox,
        trim: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin to report.

        Args:
            engine: which of the engines this worker belongs to.
            stage: its pipeline stage.
            lanes: of the consumers here.
            outbox: takes the reports.
            trim: gives memory back that was not needed for a while.

        """
        self._trim = trim
        self._engine = engine
        self._stage = stage
        self._lanes = lanes
        self._outbox = outbox
        self._addresses: dict[str, bool] = {}
        """Front ends, in the order in which they came; whether they know the latest."""
        self._said: bytes = b""
        self._reforwarded = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="capture-report", daemon=True
        )
        self._thread.start()

    def know(self, address: str) -> None:
        """A front end listens at `address`."""
        self._addresses.setdefault(address, False)

    def add_reforwarded(self, tokens: int) -> None:
        """So many prompt tokens are computed again for the sake of their rows."""
        self._reforwarded += tokens

    def close(self) -> None:
        """Say the final counters and stop."""
        self._closing.set()
        self._thread.join(timeout=5)
        self.report()

    def report(self) -> None:
        """Tell the front ends that do not know the counters as they are now."""
        counters = {name: lane.counters() for name, lane in self._lanes.items()}
        message = CountersMessage(
            self._engine,
            self._stage,
            counters,
            self._reforwarded,
            memory=self._memory(),
        )
        now = msgspec.msgpack.encode(message)
        changed, self._said = now != self._said, now
        for number, (address, knows) in enumerate(list(self._addresses.items())):
            if changed or not knows:
                message.adds = number == 0
                self._outbox.send(address, message)
                self._addresses[address] = True

    def _memory(self) -> MemoryCounters:
        """What this process holds for rows, and what it has lent to front ends."""
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
                # Counters are not worth a worker; the next report may succeed.
                logger.exception("The counters of captures could not be reported")

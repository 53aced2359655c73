# SPDX-License-Identifier: Apache-2.0
"""One consumer instance's thread: isolation from the step and from each other."""

import threading
from collections.abc import Sequence
from time import monotonic, sleep
from typing import Any, Literal

from vllm.logger import init_logger
from vllm.v1.capture.capabilities import sink_capabilities
from vllm.v1.capture.delivery.drops import DroppedRows
from vllm.v1.capture.delivery.packet_queue import Ending, Opening, Packet, PacketQueue
from vllm.v1.capture.delivery.spill import SpilledPacket, SpillStore
from vllm.v1.capture.failures import FAILURES, described
from vllm.v1.capture.payload import fault_of
from vllm.v1.capture.results import merge
from vllm.v1.capture.sink import CaptureSink
from vllm.v1.capture.stats import LaneCounters
from vllm.v1.capture.types import (
    CaptureChunk,
    CaptureFinalize,
    CaptureKey,
    CaptureResult,
)

__all__ = ["Ending", "SinkLane"]

logger = init_logger(__name__)

RESULT_TIMEOUT = 60.0
"""Seconds that a sink may take from a request's finalizes to their results."""

STALL_SECONDS = 90.0
"""Seconds that one call of a sink may take before its requests are given up."""


SHUTDOWN_GRACE = 2.0
"""Seconds that a sink's shutdown may take beyond what it is given."""


class SinkLane:
    """Feeds one sink from a bounded queue, on a thread of its own.

    Whatever the sink raises becomes the result of the key it concerns; it
    reaches neither the engine nor another consumer. That includes what is no
    `Exception`, such as `SystemExit`: it would end this thread and nothing else. A
    sink that does not come back from a call loses what waits for it, so that no
    request hangs.
    """

    def __init__(
        self,
        instance: str,
        sink: CaptureSink,
        max_bytes: int,
        max_items: int,
        overload: Literal["block", "drop"] = "block",
        spill: SpillStore | None = None,
    ) -> None:
        """Start the thread.

        Args:
            instance: the name of the consumer instance.
            sink: gets the rows.
            max_bytes: how many bytes of rows may wait in memory.
            max_items: how many packets of rows may wait in memory.
            overload: what happens where no more rows can wait.
            spill: where rows wait that do not fit in memory, if anywhere.

        """
        self.instance = instance
        self.sink = sink
        self.can = sink_capabilities(sink)
        self._queue = PacketQueue(max_bytes, max_items, spill)
        self._drops = overload == "drop"
        self._dropped = DroppedRows()
        self._counters = LaneCounters()
        self._failures: dict[CaptureKey, str] = {}
        self._refusals: dict[str, str] = {}
        self._unfinished: set[CaptureKey] = set()
        """Keys that the sink refused to finalize: it will have no result for them."""
        self._call_began: float | None = None
        self._stalled = False
        self._giving_up = threading.Lock()
        self._answered: set[Ending] = set()
        """Requests that were given up while the sink did not come back."""
        self._thread = threading.Thread(
            target=self._run, name=f"capture-{instance}", daemon=True
        )
        self._thread.start()

    def open(self, opening: Opening) -> None:
        """Queue a request's beginning, for a consumer that wants to know of it."""
        self._queue.mark(opening)

    def submit(self, chunks: Sequence[CaptureChunk]) -> None:
        """Queue the rows of a step; where the queue is full, wait, spill or drop."""
        self._dropped.renumber(chunks)
        packet = Packet.of(chunks)
        while not self.check():
            taken = self._queue.offer(packet)
            if isinstance(taken, SpilledPacket):
                self._counters.spilled_rows += taken.num_rows
                self._counters.spilled_bytes += taken.num_bytes
            elif taken is None and self._drops:
                self._dropped.note(chunks)
                self._counters.dropped_rows += packet.num_rows
            elif taken is None:
                self._queue.wait_for_room(packet, 1.0)
                continue
            return
        self._lose(packet)

    def finish(self, ending: Ending) -> None:
        """Queue a request's end; never waits, as it holds no rows."""
        settled = tuple(self._dropped.settle(ending.finalizes))
        ending = Ending(ending.request_id, settled, ending.answer)
        self._queue.mark(ending)
        if self.check():
            self._give_up(ending)

    def counters(self) -> LaneCounters:
        """What was done so far, and what waits now."""
        self._counters.queue_depth = len(self._queue)
        self._counters.queue_bytes = self._queue.num_bytes
        self._counters.spill_bytes = self._queue.spilled_bytes
        self._counters.rewritten_bytes = getattr(self.sink, "rewritten_bytes", 0)
        return self._counters

    def close(self, timeout: float) -> None:
        """Work off the queue, at most `timeout` seconds, and shut the sink down."""
        deadline = monotonic() + timeout
        self._queue.close()
        self._thread.join(timeout)
        if self._thread.is_alive():
            endings = self._queue.endings()
            logger.error(
                "Consumer %s did not work off its queue in %.0f s: %d rows of "
                "captures are lost, and the results of %d requests: %s",
                self.instance,
                timeout,
                self._queue.waiting_rows(),
                len(endings),
                [ending.request_id for ending in endings[:8]],
            )
            for ending in endings:
                self._give_up(ending, "the engine stopped before it was delivered")
        self._shut_down(max(deadline - monotonic(), 0.0))

    def _shut_down(self, timeout: float) -> None:
        """Shut the sink down; one that does not come back is left behind."""
        shutting = threading.Thread(
            target=self._shutdown_sink,
            args=(timeout,),
            name=f"capture-{self.instance}-shutdown",
            daemon=True,
        )
        shutting.start()
        shutting.join(timeout + SHUTDOWN_GRACE)
        if shutting.is_alive():
            logger.error(
                "Consumer %s did not shut down in %.0f s and is left behind",
                self.instance,
                timeout + SHUTDOWN_GRACE,
            )

    def _shutdown_sink(self, timeout: float) -> None:
        try:
            self.sink.shutdown(timeout)
        except BaseException as error:
            FAILURES.tell(self.instance, "its shutdown", error)

    def check(self) -> bool:
        """Whether the sink has not come back from a call for too long.

        Then its requests are answered with an error, and rows for it are lost,
        until it does come back. Called now and then by the lane's owner.
        """
        began = self._call_began
        limit = max(STALL_SECONDS, self.can.max_call_seconds)
        if began is None or monotonic() - began < limit:
            self._stalled = False
            return False
        with self._giving_up:
            if not self._stalled:
                self._stalled = True
                self._give_up_all(limit)
        return True

    def _give_up_all(self, limit: float) -> None:
        logger.error(
            "Consumer %s has not come back from a call for %.0f s: the requests that "
            "wait for it are given up",
            self.instance,
            limit,
        )
        for packet in self._queue.discard_packets():
            self._lose(packet)
        for ending in self._queue.endings():
            self._give_up(ending)

    def _lose(self, packet: Packet | SpilledPacket) -> None:
        for key in packet.keys:
            self._failures.setdefault(key, "the consumer does not come back")

    def _give_up(
        self, ending: Ending, why: str = "the consumer does not come back"
    ) -> None:
        """Answer for a sink that does not; it gets the finalizes when it returns."""
        if ending in self._answered:
            return
        self._answered.add(ending)
        for finalize in ending.finalizes:
            self._failures.setdefault(finalize.key, why)
            self._counters.failed_rows += finalize.sidecar.get("num_rows", 0)
        key: Any = (ending.request_id, -1, "*")
        self._deliver(ending, CaptureResult(key, "error", why))

    def _run(self) -> None:
        while (item := self._queue.head()) is not None:
            # The item keeps its place in the queue while it is worked on, so
            # that the bounds count the rows that the sink still holds.
            if isinstance(item, Ending):
                self._end(item)
            elif isinstance(item, Opening):
                self._open(item)
            else:
                self._replay(item)
            self._call_began = None
            self._queue.pop(item)

    def _open(self, opening: Opening) -> None:
        try:
            self._begin_call()
            opening.tell()
        except BaseException as error:
            FAILURES.tell(self.instance, f"the spec of {opening.request_id}", error)
            self._refusals[opening.request_id] = described(error)

    def _replay(self, packet: Packet | SpilledPacket) -> None:
        try:
            chunks = self._queue.read(packet)
        except Exception as error:
            for key in packet.keys:
                self._fail(key, error)
            return
        live = [chunk for chunk in chunks if chunk.key not in self._failures]
        handed = packet if len(live) == len(chunks) else Packet.of(live)
        self._counters.rows += handed.num_rows
        self._counters.bytes += handed.num_bytes
        self._feed(live)

    def _feed(self, live: Sequence[CaptureChunk]) -> None:
        if not live:
            return
        batch = self.can.submit_chunk_batch
        if batch is not None:
            try:
                self._begin_call()
                batch(live)
            except BaseException as error:
                for chunk in live:
                    self._fail(chunk.key, error)
            return
        for chunk in live:
            if chunk.key in self._failures:
                continue
            try:
                self._begin_call()
                self.sink.submit_chunk(chunk)
            except BaseException as error:
                self._fail(chunk.key, error)

    def _fail(self, key: CaptureKey, error: BaseException) -> None:
        FAILURES.tell(self.instance, key, error)
        self._failures[key] = described(error)

    def _end(self, ending: Ending) -> None:
        refusal = self._refusals.pop(ending.request_id, None)
        if refusal is not None:
            for finalize in ending.finalizes:
                self._failures.setdefault(finalize.key, refusal)
        for finalize in ending.finalizes:
            if finalize.key in self._failures:
                finalize.sidecar.setdefault(
                    "capture_error", self._failures[finalize.key]
                )
            try:
                self._begin_call()
                self.sink.submit_finalize(finalize)
            except BaseException as error:
                self._fail(finalize.key, error)
                self._unfinished.add(finalize.key)
        self._end_request(ending)
        when_done = self.can.when_done
        if when_done is None or not ending.finalizes:
            self._answer(ending)
        else:
            # Meanwhile the sink gets what follows, so that it can write the rows
            # of several requests at once.
            when_done(ending.request_id, lambda: self._answer(ending))

    def _answer(self, ending: Ending) -> None:
        """Give the results, on the lane's thread or on one of the sink's."""
        deadline = monotonic() + RESULT_TIMEOUT
        results = [self._result_of(final, deadline) for final in ending.finalizes]
        for finalize, result in zip(ending.finalizes, results):
            self._failures.pop(finalize.key, None)
            if result.status == "error" and ending not in self._answered:
                self._counters.failed_rows += finalize.sidecar.get("num_rows", 0)
        if not results:
            key: Any = (ending.request_id, -1, "*")
            results = [CaptureResult(key, "ok")]
        if ending in self._answered:
            self._answered.discard(ending)
            return
        self._deliver(ending, merge(ending.request_id, results))

    def _deliver(self, ending: Ending, result: CaptureResult) -> None:
        self._counters.requests += 1
        try:
            ending.answer(result)
        except Exception:
            logger.exception(
                "The result of %s at consumer %s was not delivered",
                ending.request_id,
                self.instance,
            )

    def _end_request(self, ending: Ending) -> None:
        request_end = self.can.submit_request_end
        if request_end is None:
            return
        try:
            self._begin_call()
            request_end(ending.request_id, ending.finalizes)
        except BaseException as error:
            for finalize in ending.finalizes:
                self._fail(finalize.key, error)

    def _result_of(self, finalize: CaptureFinalize, deadline: float) -> CaptureResult:
        key = finalize.key
        result: CaptureResult | None = None
        if key in self._unfinished:
            self._unfinished.discard(key)
            deadline = 0.0
        try:
            result = self._wait_for(key, deadline)
        except BaseException as error:
            self._fail(key, error)
        failure = self._failures.get(key) or finalize.sidecar.get("capture_error")
        if failure is not None:
            return CaptureResult(key, "error", failure)
        if result is None or result.status == "pending":
            return CaptureResult(
                key, "error", f"no result within {RESULT_TIMEOUT:.0f} s"
            )
        fault = fault_of(result.payload)
        if fault is not None:
            return CaptureResult(key, "error", f"the consumer's payload {fault}")
        note = finalize.sidecar.get("capture_note")
        if note is not None and result.status == "ok":
            return CaptureResult(key, "partial_error", note, result.payload)
        return result

    def _wait_for(self, key: CaptureKey, deadline: float) -> CaptureResult | None:
        self._begin_call()
        result = self.sink.get_result(key)
        if result is not None and result.status != "pending":
            return result
        waiting = self.can.wait_for_result
        if waiting is not None:
            return waiting(key, max(deadline - monotonic(), 0.0))
        while (result is None or result.status == "pending") and (
            monotonic() < deadline
        ):
            sleep(0.005)
            self._begin_call()
            result = self.sink.get_result(key)
        return result

    def _begin_call(self) -> None:
        """The sink is about to be called; on a thread of its own it may wait."""
        if threading.current_thread() is self._thread:
            self._call_began = monotonic()

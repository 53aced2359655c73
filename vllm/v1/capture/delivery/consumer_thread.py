# SPDX-License-Identifier: Apache-2.0
"""`SinkLane`: the thread of a consumer instance, which isolates it from the engine."""

import threading
from collections.abc import Mapping, Sequence
from time import monotonic, sleep
from typing import Any, Literal

from vllm.logger import init_logger
from vllm.v1.capture.capabilities import sink_capabilities
from vllm.v1.capture.delivery.dropped_rows import DroppedRows
from vllm.v1.capture.delivery.packet_queue import (
    Ending,
    Opening,
    Packet,
    PacketQueue,
)
from vllm.v1.capture.delivery.spill import SpilledPacket, SpillStore
from vllm.v1.capture.failures import FAILURES
from vllm.v1.capture.groups import AnyChunk, GroupEnd, chunks_in
from vllm.v1.capture.results import RowsByTap, merge
from vllm.v1.capture.sink import CaptureSink
from vllm.v1.capture.stats import LaneCounters
from vllm.v1.capture.types import CaptureFinalize, CaptureKey, CaptureResult
from vllm.v1.residual.plain_data import fault_of
from vllm.v1.residual.plugin_errors import described

__all__ = ["Ending", "SinkLane"]

logger = init_logger(__name__)

RESULT_TIMEOUT = 60.0
"""Seconds that a sink may take from a request's finalizes to its results."""

STALL_SECONDS = 90.0
"""Seconds that one call of a sink may take before its requests fail."""


SHUTDOWN_GRACE = 2.0
"""Seconds that a sink's shutdown may exceed its timeout by."""


class SinkLane:
    """Calls one sink from its own thread, which is fed by a bounded queue.

    Whatever the sink raises becomes the result of the key concerned and affects neither
    the engine nor other consumers. This includes exceptions that are not an
    `Exception`, such as `SystemExit`, which would only end this thread. If a call of
    the sink does not return in time, the queued rows are lost and their requests fail,
    so that no request hangs.

    `submit` and `finish` are called on one thread; the other methods on any.
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
        """Create the lane; its thread starts with the first item.

        Args:
            instance: the name of the consumer instance.
            sink: receives the rows.
            max_bytes: maximum bytes of rows queued in memory.
            max_items: maximum number of packets queued in memory.
            overload: whether `submit` blocks or drops rows when the queue is full.
            spill: stores rows that do not fit in memory; None disables spilling.

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
        """Keys whose `submit_finalize` raised: the sink has no result for them."""
        self._call_began: float | None = None
        self._stalled = False
        self._giving_up = threading.Lock()
        self._answered: set[Ending] = set()
        """Requests that got an error result because the sink had stalled."""
        self._thread = threading.Thread(
            target=self._run, name=f"capture-{instance}", daemon=True
        )
        self._starting = threading.Lock()

    def start(self) -> None:
        """Start the thread unless it runs; called before anything is queued.

        Most servers have lanes that no request uses, such as that of live rows.
        """
        if self._thread.ident is None:
            with self._starting:
                if self._thread.ident is None:
                    self._thread.start()

    def open(self, opening: Opening) -> None:
        """Queue the start of a request, for a consumer that needs its spec."""
        self.start()
        self._queue.mark(opening)

    def submit(self, items: Sequence[AnyChunk]) -> None:
        """Queue the rows of a step; if the queue is full, spill, drop or block."""
        self.start()
        if self._dropped.positions:
            items = chunks = chunks_in(items)
            self._dropped.renumber(chunks)
        packet = Packet.of(items)
        while not self.check():
            taken = self._queue.offer(packet)
            if isinstance(taken, SpilledPacket):
                self._counters.spilled_rows += taken.num_rows
                self._counters.spilled_bytes += taken.num_bytes
            elif taken is None and self._drops:
                self._dropped.note(chunks_in(items))
                self._counters.dropped_rows += packet.num_rows
            elif taken is None:
                self._queue.wait_for_room(packet, 1.0)
                continue
            return
        self._lose(packet)

    def finish(self, ending: Ending) -> None:
        """Queue the end of a request; never blocks, as it holds no rows."""
        self.start()
        if self._dropped.positions:
            settled = tuple(self._dropped.settle(ending.finalizes))
            ending = Ending(ending.request_id, settled, ending.answer)
        self._queue.mark(ending)
        if self.check():
            self._give_up(ending)

    def counters(self) -> LaneCounters:
        """The counters, updated to the current state of the queue."""
        self._counters.queue_depth = len(self._queue)
        self._counters.queue_bytes = self._queue.num_bytes
        self._counters.spill_bytes = self._queue.spilled_bytes
        if self.can.rewritten_bytes is not None:
            self._counters.rewritten_bytes = self.can.rewritten_bytes()
        return self._counters

    def close(self, timeout: float) -> None:
        """Process the queue, for `timeout` seconds at most, and shut down the sink."""
        deadline = monotonic() + timeout
        self._queue.close()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        if self._thread.is_alive():
            endings = self._queue.endings()
            logger.error(
                "Consumer %s did not empty its queue in %.0f s: %d rows of captures "
                "are lost, and the results of %d requests: %s",
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
        """Shut down the sink on a thread, which is abandoned if it hangs."""
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
                "Consumer %s did not shut down in %.0f s and is abandoned",
                self.instance,
                timeout + SHUTDOWN_GRACE,
            )

    def _shutdown_sink(self, timeout: float) -> None:
        try:
            self.sink.shutdown(timeout)
        except BaseException as error:
            FAILURES.log(self.instance, "its shutdown", error)

    def check(self) -> bool:
        """Whether the sink has stalled: its current call takes longer than the limit.

        While it is stalled, its requests fail and its rows are lost. Called
        periodically by the owner of the lane.
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
            "Consumer %s has not returned from a call for %.0f s: the requests that "
            "wait for it fail",
            self.instance,
            limit,
        )
        for packet in self._queue.discard_packets():
            self._lose(packet)
        for ending in self._queue.endings():
            self._give_up(ending)

    def _lose(self, packet: Packet | SpilledPacket) -> None:
        for key in packet.keys:
            self._failures.setdefault(key, "the consumer has not returned from a call")

    def _give_up(
        self, ending: Ending, why: str = "the consumer has not returned from a call"
    ) -> None:
        """Send an error result for a stalled sink, which still gets the finalizes."""
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
            # The item stays in the queue while it is processed, so that the bounds
            # include the rows that the sink is working on.
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
            opening.pass_spec()
        except BaseException as error:
            FAILURES.log(self.instance, f"the spec of {opening.request_id}", error)
            self._refusals[opening.request_id] = described(error)

    def _replay(self, packet: Packet | SpilledPacket) -> None:
        try:
            items = self._queue.read(packet)
        except Exception as error:
            for key in packet.keys:
                self._fail(key, error)
            return
        handed: Packet | SpilledPacket = packet
        if self._failures:
            chunks = chunks_in(items)
            items = [chunk for chunk in chunks if chunk.key not in self._failures]
            handed = packet if len(items) == len(chunks) else Packet.of(items)
        self._counters.rows += handed.num_rows
        self._counters.bytes += handed.num_bytes
        if items:
            self._feed(items)

    def _feed(self, items: Sequence[AnyChunk]) -> None:
        groups = self.can.groups
        if groups is not None:
            try:
                self._begin_call()
                groups.submit_rows(items)
            except BaseException as error:
                for chunk in chunks_in(items):
                    self._fail(chunk.key, error)
            return
        live = chunks_in(items)
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
        FAILURES.log(self.instance, key, error)
        self._failures[key] = described(error)

    def _end(self, ending: Ending) -> None:
        refusal = self._refusals.pop(ending.request_id, None)
        if refusal is not None:
            for finalize in ending.finalizes:
                self._failures.setdefault(finalize.key, refusal)
        results = self._finish_groups(ending)
        if results is not None:
            self._conclude(ending, results)
            return
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
            # Until then the sink gets further items, so that it can write the rows of
            # several requests at once.
            when_done(ending.request_id, lambda: self._answer(ending))

    def _finish_groups(self, ending: Ending) -> list[CaptureResult] | None:
        """End whole groups of keys; None if the sink takes the keys one by one.

        So it does if any key has failed, because the others of its group may not have.
        """
        groups = self.can.groups
        ends = [end for end in ending.ends if isinstance(end, GroupEnd)]
        failed = any("capture_error" in end.sidecar for end in ends)
        if groups is None or self._failures or failed or len(ends) < len(ending.ends):
            return None
        try:
            self._begin_call()
            results = groups.submit_ends(ending.request_id, ends)
        except BaseException as error:
            FAILURES.log(self.instance, ending.request_id, error)
            key: Any = (ending.request_id, -1, "*")
            results = [CaptureResult(key, "error", described(error)) for _ in ends]
        if results is None:
            return None
        for end, result in zip(ends, results, strict=True):
            if result.status == "error" and ending not in self._answered:
                rows = end.sidecar.get("num_rows", 0) * len(end.taps)
                self._counters.failed_rows += rows
        return [noted(result, end.sidecar) for end, result in zip(ends, results)]

    def _answer(self, ending: Ending) -> None:
        """Collect and send the results, on the lane's thread or on one of the sink."""
        deadline = monotonic() + RESULT_TIMEOUT
        results = [self._result_of(final, deadline) for final in ending.finalizes]
        for finalize, result in zip(ending.finalizes, results):
            self._failures.pop(finalize.key, None)
            if result.status == "error" and ending not in self._answered:
                self._counters.failed_rows += finalize.sidecar.get("num_rows", 0)
        self._conclude(ending, results)

    def _conclude(self, ending: Ending, results: Sequence[CaptureResult]) -> None:
        """Send the merged result of a request, unless it was given up."""
        if not results:
            key: Any = (ending.request_id, -1, "*")
            results = [CaptureResult(key, "ok")]
        if ending in self._answered:
            self._answered.discard(ending)
            for finalize in ending.finalizes:
                self._failures.pop(finalize.key, None)
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
        # Its own class holds what the consumers of this project put into it.
        is_plain = type(result.payload) is RowsByTap
        fault = None if is_plain else fault_of(result.payload)
        if fault is not None:
            return CaptureResult(key, "error", f"the consumer's payload {fault}")
        return noted(result, finalize.sidecar)

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
        """Note when a call of the sink begins; calls on other threads may block."""
        if threading.current_thread() is self._thread:
            self._call_began = monotonic()


def noted(result: CaptureResult, sidecar: Mapping[str, Any]) -> CaptureResult:
    """`result`, or a partial error if the sidecar notes that rows are missing."""
    note = sidecar.get("capture_note")
    if note is not None and result.status == "ok":
        return CaptureResult(result.key, "partial_error", note, result.payload)
    return result

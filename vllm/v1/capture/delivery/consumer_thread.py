# SPDX-License-Identifier: Apache-2.0
"""The thread of a consumer instance, which isolates it from the engine.

What a sink raises becomes the result of the keys concerned (`GuardedSink`), and a call
that does not return fails the requests that wait for it (`SinkLane`).
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from time import monotonic, sleep
from typing import Any, Literal

from vllm.logger import init_logger
from vllm.v1.capture.capabilities import sink_capabilities
from vllm.v1.capture.delivery.packet_queue import (
    DroppedRows,
    Ending,
    Opening,
    Packet,
    PacketQueue,
)
from vllm.v1.capture.delivery.spill import SpillStore
from vllm.v1.capture.groups import GroupChunk, chunks_in
from vllm.v1.capture.results import RowsByTap, merge, request_key
from vllm.v1.capture.sink import CaptureSink
from vllm.v1.capture.stats import LaneCounters
from vllm.v1.capture.types import CaptureFinalize, CaptureKey, CaptureResult
from vllm.v1.residual.plain_data import fault_of
from vllm.v1.residual.plugin_errors import FAILURES, described

__all__ = ["Ending", "SinkLane"]

logger = init_logger(__name__)

STALL_SECONDS = 90.0
"""Seconds that one call of a sink may take before its requests fail."""

RESULT_TIMEOUT = 60.0
"""Seconds that a sink may take from a request's finalizes to its results."""

SHUTDOWN_GRACE = 2.0
"""Seconds that a sink's shutdown may exceed its timeout by."""

STALLED = "the consumer has not returned from a call"
"""Error of what a stalled sink loses."""

Outcome = tuple[CaptureResult, int]
"""A result, and the number of rows that it is about."""


class GuardedSink:
    """A sink of which no exception escapes, and whose calls are timed.

    This includes exceptions that are not an `Exception`, such as `SystemExit`, which
    would only end the calling thread. Rows and ends are passed on one thread, that of
    the lane; `outcomes` is also called on one of the sink's.
    """

    def __init__(self, instance: str, sink: CaptureSink) -> None:
        self.instance = instance
        self.sink = sink
        self.can = sink_capabilities(sink)
        self.failures: dict[CaptureKey, str] = {}
        """Keys that have failed: they get no more rows, and an error result."""
        self._refusals: dict[str, str] = {}
        self._unfinished: set[CaptureKey] = set()
        """Keys whose `submit_finalize` raised: the sink has no result for them."""
        self._thread: threading.Thread | None = None
        self.call_began: float | None = None
        """When the present call began on the lane's thread; None between calls."""

    def rest(self) -> None:
        """Note that no call is made until the next item, on the lane's thread."""
        self._thread = threading.current_thread()
        self.call_began = None

    def open(self, opening: Opening) -> None:
        """Pass the spec of a request that starts."""
        try:
            self._begin_call()
            opening.pass_spec()
        except BaseException as error:
            FAILURES.log(self.instance, f"the spec of {opening.request_id}", error)
            self._refusals[opening.request_id] = described(error)

    def feed(self, items: Sequence[GroupChunk]) -> None:
        """Pass rows, in the largest units that the sink takes."""
        groups, batch = self.can.groups, self.can.submit_chunk_batch
        keys = (key for item in items for key in item.keys)
        if groups is not None:
            with self._calling(keys):
                groups.submit_rows(items)
        elif batch is not None:
            with self._calling(keys):
                batch(chunks_in(items))
        else:
            for chunk in chunks_in(items):
                if chunk.key not in self.failures:
                    with self._calling([chunk.key]):
                        self.sink.submit_chunk(chunk)

    @contextmanager
    def _calling(self, keys: Iterable[CaptureKey]) -> Iterator[None]:
        """A call of the sink; what it raises is the result of `keys`."""
        try:
            self._begin_call()
            yield
        except BaseException as error:
            for key in keys:
                self.fail(key, error)

    def fail(self, key: CaptureKey, error: BaseException) -> None:
        """Log an exception, and let it be the result of a key."""
        FAILURES.log(self.instance, key, error)
        self.failures[key] = described(error)

    def finish_groups(self, ending: Ending) -> list[Outcome] | None:
        """End whole groups of keys; None if the sink takes the keys one by one.

        So it does if any key has failed, because the others of its group may not have.
        """
        refusal = self._refusals.pop(ending.request_id, None)
        if refusal is not None:
            for finalize in ending.finalizes:
                self.failures.setdefault(finalize.key, refusal)
        groups = self.can.groups
        failed = any("capture_error" in end.sidecar for end in ending.ends)
        if groups is None or self.failures or failed:
            return None
        try:
            self._begin_call()
            results = groups.submit_ends(ending.request_id, ending.ends)
        except BaseException as error:
            FAILURES.log(self.instance, ending.request_id, error)
            key = request_key(ending.request_id)
            error_of_all = CaptureResult(key, "error", described(error))
            results = [error_of_all] * len(ending.ends)
        if results is None:
            return None
        return [
            (
                noted(result, end.sidecar),
                end.sidecar.get("num_rows", 0) * len(end.taps),
            )
            for end, result in zip(ending.ends, results, strict=True)
        ]

    def finish_keys(self, ending: Ending) -> None:
        """End the keys of a request one by one, then the request."""
        for finalize in ending.finalizes:
            if finalize.key in self.failures:
                finalize.sidecar.setdefault(
                    "capture_error", self.failures[finalize.key]
                )
            try:
                self._begin_call()
                self.sink.submit_finalize(finalize)
            except BaseException as error:
                self.fail(finalize.key, error)
                self._unfinished.add(finalize.key)
        if self.can.submit_request_end is not None:
            with self._calling(finalize.key for finalize in ending.finalizes):
                self.can.submit_request_end(ending.request_id, ending.finalizes)

    def outcomes(self, ending: Ending) -> list[Outcome]:
        """Collect the results of a request whose keys were ended."""
        deadline = monotonic() + RESULT_TIMEOUT
        found = [
            (self._result_of(final, deadline), final.sidecar.get("num_rows", 0))
            for final in ending.finalizes
        ]
        self.forget(ending)
        return found

    def forget(self, ending: Ending) -> None:
        """Forget the failures of a request."""
        for finalize in ending.finalizes:
            self.failures.pop(finalize.key, None)

    def _result_of(self, finalize: CaptureFinalize, deadline: float) -> CaptureResult:
        key = finalize.key
        result: CaptureResult | None = None
        if key in self._unfinished:
            self._unfinished.discard(key)
            deadline = 0.0
        with self._calling([key]):
            result = self._wait_for(key, deadline)
        failure = self.failures.get(key) or finalize.sidecar.get("capture_error")
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
            self.call_began = monotonic()

    def shut_down(self, timeout: float) -> None:
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


class SinkLane:
    """Calls one sink from its own thread, which is fed by a bounded queue.

    Whatever the sink raises affects neither the engine nor other consumers. If a call
    of the sink does not return in time, the queued rows are lost and their requests
    fail, so that no request hangs.

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
        validate: Callable[[Any, Any], object] | None = None,
    ) -> None:
        """Create the lane; its thread starts with the first item.

        Args:
            instance: the name of the consumer instance.
            sink: receives the rows.
            max_bytes: maximum bytes of rows queued in memory.
            max_items: maximum number of packets queued in memory.
            overload: whether `submit` blocks or drops rows when the queue is full.
            spill: stores rows that do not fit in memory; None disables spilling.
            validate: `validate_client_spec` of a consumer that must be told the specs
                of requests; None if it need not.

        """
        self.instance = instance
        self.sink = sink
        self._guarded = GuardedSink(instance, sink)
        self.can = self._guarded.can
        self._validate = validate
        self._queue = PacketQueue(max_bytes, max_items, spill)
        self._drops = overload == "drop"
        self._dropped = DroppedRows()
        self._counters = LaneCounters()
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

    @property
    def remembers(self) -> bool:
        """Whether the consumer must be told the specs of requests."""
        return self._validate is not None

    def open(self, request_id: str, spec: Any, context: Callable[[], Any]) -> None:
        """Queue the start of a request, if the consumer needs its spec."""
        if self._validate is not None:
            self.start()
            pass_spec = partial(self._validate, spec, context())
            self._queue.mark(Opening(request_id, pass_spec))

    def submit(self, items: Sequence[GroupChunk]) -> None:
        """Queue the rows of a step; if the queue is full, spill, drop or block."""
        self.start()
        if self._dropped.positions:
            items = self._dropped.renumbered(items)
        packet = Packet.of(items)
        while not self.check():
            taken = self._queue.offer(packet)
            if taken is not None and taken.spilled is not None:
                self._counters.spilled_rows += taken.num_rows
                self._counters.spilled_bytes += taken.num_bytes
            elif taken is None and self._drops:
                self._dropped.note(items)
                self._counters.dropped_rows += packet.num_rows
            elif taken is None:
                self._queue.wait_for_room(packet)
                continue
            return
        self._lose(packet)

    def finish(self, ending: Ending) -> None:
        """Queue the end of a request; never blocks, as it holds no rows."""
        self.start()
        if self._dropped.positions:
            settled = self._dropped.settle(ending.ends)
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
        self._guarded.shut_down(max(deadline - monotonic(), 0.0))

    def check(self) -> bool:
        """Whether the sink has stalled: its current call takes longer than the limit.

        While it is stalled, its requests fail and its rows are lost. Called
        periodically by the owner of the lane.
        """
        began = self._guarded.call_began
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

    def _lose(self, packet: Packet) -> None:
        for key in packet.keys:
            self._guarded.failures.setdefault(key, STALLED)

    def _give_up(self, ending: Ending, why: str = STALLED) -> None:
        """Send an error result for a stalled sink, which still gets the finalizes."""
        if ending in self._answered:
            return
        self._answered.add(ending)
        for finalize in ending.finalizes:
            self._guarded.failures.setdefault(finalize.key, why)
            self._counters.failed_rows += finalize.sidecar.get("num_rows", 0)
        self._deliver(
            ending, CaptureResult(request_key(ending.request_id), "error", why)
        )

    def _run(self) -> None:
        self._guarded.rest()
        while (item := self._queue.head()) is not None:
            # The item stays in the queue while it is processed, so that the bounds
            # include the rows that the sink is working on.
            if isinstance(item, Ending):
                self._end(item)
            elif isinstance(item, Opening):
                self._guarded.open(item)
            else:
                self._replay(item)
            self._guarded.rest()
            self._queue.pop(item)

    def _replay(self, packet: Packet) -> None:
        try:
            items = packet.read()
        except Exception as error:
            for key in packet.keys:
                self._guarded.fail(key, error)
            return
        if failures := self._guarded.failures:
            alone = [one for item in items for one in item.apart()]
            items = [one for one in alone if one.keys[0] not in failures]
            packet = Packet.of(items)
        self._counters.rows += packet.num_rows
        self._counters.bytes += packet.num_bytes
        if items:
            self._guarded.feed(items)

    def _end(self, ending: Ending) -> None:
        outcomes = self._guarded.finish_groups(ending)
        if outcomes is not None:
            self._conclude(ending, outcomes)
            return
        self._guarded.finish_keys(ending)
        when_done = self.can.when_done
        if when_done is None or not ending.finalizes:
            self._answer(ending)
        else:
            # Until then the sink gets further items, so that it can write the rows of
            # several requests at once.
            when_done(ending.request_id, lambda: self._answer(ending))

    def _answer(self, ending: Ending) -> None:
        """Collect and send the results, on the lane's thread or on one of the sink."""
        self._conclude(ending, self._guarded.outcomes(ending))

    def _conclude(self, ending: Ending, outcomes: Sequence[Outcome]) -> None:
        """Send the merged result of a request, unless it was given up."""
        if ending in self._answered:
            self._answered.discard(ending)
            self._guarded.forget(ending)
            return
        for result, num_rows in outcomes:
            if result.status == "error":
                self._counters.failed_rows += num_rows
        nothing = CaptureResult(request_key(ending.request_id), "ok")
        results = [result for result, _ in outcomes] or [nothing]
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


def noted(result: CaptureResult, sidecar: Mapping[str, Any]) -> CaptureResult:
    """`result`, or a partial error if the sidecar notes that rows are missing."""
    note = sidecar.get("capture_note")
    if note is not None and result.status == "ok":
        return CaptureResult(result.key, "partial_error", note, result.payload)
    return result

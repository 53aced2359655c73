# SPDX-License-Identifier: Apache-2.0
"""`SinkLane`: the thread of a consumer instance, which isolates it from the engine."""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import Any, Literal

from msgspec.structs import replace

from vllm.logger import init_logger
from vllm.v1.capture.delivery.guarded_sink import GuardedSink, Outcome
from vllm.v1.capture.delivery.packet_queue import (
    Ending,
    Opening,
    Packet,
    PacketQueue,
)
from vllm.v1.capture.delivery.spill import SpillStore
from vllm.v1.capture.groups import GroupChunk, GroupEnd
from vllm.v1.capture.results import merge
from vllm.v1.capture.sink import CaptureSink
from vllm.v1.capture.stats import LaneCounters
from vllm.v1.capture.types import CaptureKey, CaptureResult

__all__ = ["Ending", "SinkLane"]

logger = init_logger(__name__)

STALL_SECONDS = 90.0
"""Seconds that one call of a sink may take before its requests fail."""


class DroppedRows:
    """The dropped positions of each key, until its request ends.

    Used on the submitting thread only. The rows that a consumer gets are numbered
    without gaps: row offsets count delivered rows, and the sidecar lists their
    positions.
    """

    def __init__(self) -> None:
        self.positions: dict[CaptureKey, list[int]] = {}

    def note(self, items: Sequence[GroupChunk]) -> None:
        """Record rows that will not be delivered."""
        for item in items:
            for key in item.keys:
                self.positions.setdefault(key, []).extend(item.positions)

    def renumbered(self, items: Sequence[GroupChunk]) -> list[GroupChunk]:
        """The rows by key, with offsets that count delivered rows only."""
        return [
            replace(one, row_offset=one.row_offset - len(self.positions.get(key, ())))
            for item in items
            for one, key in zip(item.apart(), item.keys, strict=True)
        ]

    def settle(self, ends: Sequence[GroupEnd]) -> Sequence[GroupEnd]:
        """The ends of a request, with its dropped rows noted in the sidecars.

        Dropped rows past the end of the request are ignored.
        """
        dropped = {
            key: set(self.positions.pop(key, ())).intersection(end.sidecar["positions"])
            for end in ends
            for key in end.keys
        }
        if not any(dropped.values()):
            return ends
        count = sum(map(len, dropped.values()))
        rows = sum(len(end.sidecar["positions"]) * len(end.taps) for end in ends)
        note = (
            f"{count} of {rows} rows were dropped because the consumer was too "
            "slow (--capture-overload-policy drop)"
        )
        return [
            replace(
                end,
                taps=(tap,),
                sidecar=_without(end.sidecar, lost, note) if lost else end.sidecar,
            )
            for end in ends
            for tap, key in zip(end.taps, end.keys, strict=True)
            for lost in [dropped[key]]
        ]


def _without(sidecar: dict[str, Any], dropped: set[int], note: str) -> dict[str, Any]:
    """`sidecar` without the dropped positions, and with `note`."""
    kept = [
        (position, token)
        for position, token in zip(sidecar["positions"], sidecar["token_ids"])
        if position not in dropped
    ]
    earlier = sidecar.get("capture_note")
    return sidecar | {
        "positions": [position for position, _ in kept],
        "token_ids": [token for _, token in kept],
        "num_rows": len(kept),
        "dropped_rows": len(sidecar["positions"]) - len(kept),
        "capture_note": note if earlier is None else f"{earlier}; {note}",
    }


class SinkLane:
    """Calls one sink from its own thread, which is fed by a bounded queue.

    Whatever the sink raises becomes the result of the key concerned (`GuardedSink`) and
    affects neither the engine nor other consumers. If a call of the sink does not
    return in time, the queued rows are lost and their requests fail, so that no request
    hangs.

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

    def open(self, request_id: str, spec: Any, context: Any) -> None:
        """Queue the start of a request, for a consumer that needs its spec."""
        assert self._validate is not None, "the consumer needs no spec"
        self.start()
        self._queue.mark(Opening(request_id, partial(self._validate, spec, context)))

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
                self._queue.wait_for_room(packet, 1.0)
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
            self._guarded.failures.setdefault(
                key, "the consumer has not returned from a call"
            )

    def _give_up(
        self, ending: Ending, why: str = "the consumer has not returned from a call"
    ) -> None:
        """Send an error result for a stalled sink, which still gets the finalizes."""
        if ending in self._answered:
            return
        self._answered.add(ending)
        for finalize in ending.finalizes:
            self._guarded.failures.setdefault(finalize.key, why)
            self._counters.failed_rows += finalize.sidecar.get("num_rows", 0)
        key: Any = (ending.request_id, -1, "*")
        self._deliver(ending, CaptureResult(key, "error", why))

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
        key: Any = (ending.request_id, -1, "*")
        results = [result for result, _ in outcomes] or [CaptureResult(key, "ok")]
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

# SPDX-License-Identifier: Apache-2.0
"""The dispatch thread: splits staged rows of steps into chunks for consumers."""

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from typing import TypeAlias

import torch

from vllm.logger import init_logger
from vllm.v1.capture.delivery.consumer_thread import SinkLane
from vllm.v1.capture.delivery.packet_queue import Ending
from vllm.v1.capture.dispatch.request import Answer, CapturedRequest, never_started
from vllm.v1.capture.dispatch.step_buffer import ByGroup, StagedStep, StepBuffer
from vllm.v1.capture.groups import GroupChunk
from vllm.v1.capture.memory.row_copy import RowCopy, copy_rows
from vllm.v1.capture.staging.ring import Staging
from vllm.v1.residual.capture_plan import CaptureEnd

logger = init_logger(__name__)

PACKET_BYTES = 32 << 20
"""Approximate size of a packet with the last rows of requests that end together."""

Arrival: TypeAlias = tuple[Sequence[StagedStep], "torch.cuda.Event | None"]
"""Steps, and the event after which their rows are on the host."""

Work: TypeAlias = tuple[Sequence[Arrival], Callable[[], None]]
"""Steps to add, and the function to call after that."""


class Dispatcher:
    """Owns the captured requests and processes their rows on the dispatch thread.

    The public methods are called on the engine's thread and only append to a queue.
    The rows in the queue are bounded by staging memory, whose segments are released
    on the dispatch thread.
    """

    def __init__(
        self,
        staging: Staging,
        lanes: Mapping[str, SinkLane],
        packet_bytes: int = PACKET_BYTES,
    ) -> None:
        """Start the thread.

        Args:
            staging: the staging memory, whose segments it releases.
            lanes: the lane of each consumer instance.
            packet_bytes: no further request is added to a packet of at least this
                size.

        """
        self._packet_bytes = packet_bytes
        self._lanes = lanes
        self._requests: dict[str, CapturedRequest] = {}
        self._pending = StepBuffer(staging, self._requests)
        self._sent: list[Arrival] = []
        """Sent with the next item of the queue; used on the engine's thread only."""
        self._queue: SimpleQueue[Work | None] = SimpleQueue()
        """None ends the thread."""
        self._thread = threading.Thread(
            target=self._run, name="capture-dispatch", daemon=True
        )
        self._thread.start()

    def open(self, request: CapturedRequest) -> None:
        """Add a request whose rows will follow; its id must be new."""
        self._requests[request.req_id] = request

    def steps(
        self, staged: Sequence[StagedStep], copied: torch.cuda.Event | None
    ) -> None:
        """Add steps, in order.

        Their rows wait until their requests end, or until `hand_on`. The thread is
        woken only then.

        Args:
            staged: the steps.
            copied: the event after which their rows are on the host; None if they are.

        """
        self._sent.append((staged, copied))

    def lose(self, staged: Sequence[StagedStep]) -> None:
        """Release the memory of steps whose rows cannot be copied, in their order."""
        self._put(lambda: self._pending.lose(staged))

    def hand_on(self, req_ids: Sequence[str] | None = None) -> None:
        """Distribute the waiting rows to their requests.

        Args:
            req_ids: only these requests; by default all, which frees the memory.

        """
        if req_ids is None:
            self._put(lambda: self._hand_on(self._pending.take_all()))
        else:
            self._put(lambda: self._hand_on_to(req_ids))

    def end(self, ends: Sequence[tuple[CaptureEnd, Answer]]) -> None:
        """End requests; all steps that computed their rows were added before."""
        self._put(lambda: self._finish(ends))

    def close(self, timeout: float) -> None:
        """Process the rest of the queue, for `timeout` seconds at most, and stop.

        The ends of all requests must be in the queue.
        """
        self._put(lambda: None)
        self._queue.put(None)
        self._thread.join(timeout)
        if self._requests:
            logger.error(
                "The captured rows of %d requests were not delivered within %.0f s; "
                "they are lost: %s",
                len(self._requests),
                timeout,
                sorted(self._requests)[:8],
            )

    def _put(self, work: Callable[[], None]) -> None:
        sent, self._sent = self._sent, []
        self._queue.put((sent, work))

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            sent, work = item
            for arrival in sent:
                self._try(partial(self._arrive, *arrival))
            self._try(work)

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:
            # Rows are missing now. Each request detects its missing rows at its end.
            logger.exception("Captured rows could not be distributed to their requests")

    def _arrive(
        self, staged: Sequence[StagedStep], copied: torch.cuda.Event | None
    ) -> None:
        try:
            if copied is not None:
                copied.synchronize()
        except Exception:
            self._pending.lose(staged)
            raise
        self._pending.add(staged)

    def _hand_on_to(self, req_ids: Sequence[str]) -> None:
        self._hand_on(self._pending.take(req_ids))

    def _hand_on(self, pieces: Mapping[str, ByGroup]) -> None:
        """Give rows to their requests, and submit one packet to each instance.

        More packets would wake the instance's thread more often.
        """
        chunks: dict[str, list[GroupChunk]] = {}
        copies: list[RowCopy] = []
        try:
            taken = [
                (request, request.gather(own, copies))
                for req_id, own in pieces.items()
                if (request := self._requests.get(req_id)) is not None
            ]
            copy_rows(copies)
        finally:
            self._pending.release()
        for request, parts in taken:
            for group, rows in parts:
                for instance, batch in request.add(group, rows).items():
                    chunks.setdefault(instance, []).extend(batch)
        self._submit(chunks)

    def _submit(self, chunks: Mapping[str, Sequence[GroupChunk]]) -> None:
        for instance, batch in chunks.items():
            self._lanes[instance].submit(batch)

    def _finish(self, ends: Sequence[tuple[CaptureEnd, Answer]]) -> None:
        """Submit the last rows and the ends of requests, several in one packet."""
        try:
            kept: dict[bool, list[str]] = {True: [], False: []}
            for end, _ in ends:
                kept[self._keeps_rows(end)].append(end.request_id)
            if kept[False]:  # Rows that nobody gets are not copied.
                self._pending.take(kept[False])
            self._hand_on_to(kept[True])
        except Exception:  # The requests still end, and report missing rows.
            logger.exception("Captured rows could not be distributed to their requests")
        last = LastRows()
        for end, answer in ends:
            request = self._requests.pop(end.request_id, None)
            try:
                if request is None:
                    never_started(end, answer)
                else:
                    last.add(*request.finish(end, answer))
            except Exception:  # The other requests must still end.
                logger.exception("The capture of %s has no end", end.request_id)
            if last.num_bytes >= self._packet_bytes:
                self._submit_last(last)
                last = LastRows()
        self._submit_last(last)

    def _keeps_rows(self, end: CaptureEnd) -> bool:
        request = self._requests.get(end.request_id)
        return request is None or request.keeps_rows(end)

    def _submit_last(self, last: "LastRows") -> None:
        self._submit(last.chunks)
        for instance, ending in last.endings:
            self._lanes[instance].finish(ending)


class LastRows:
    """The last chunks of several requests, and the ends to submit after them."""

    def __init__(self) -> None:
        self.chunks: dict[str, list[GroupChunk]] = {}
        self.endings: list[tuple[str, Ending]] = []
        self.num_bytes = 0

    def add(
        self,
        chunks: Mapping[str, Sequence[GroupChunk]],
        endings: Mapping[str, Ending],
    ) -> None:
        """Add the chunks and ends of a request, by instance."""
        for instance, batch in chunks.items():
            self.chunks.setdefault(instance, []).extend(batch)
            self.num_bytes += sum(chunk.tensor.nbytes for chunk in batch)
        self.endings.extend(endings.items())

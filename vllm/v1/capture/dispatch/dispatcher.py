# SPDX-License-Identifier: Apache-2.0
"""From steps' staged rows to each consumer's chunks, off the engine's thread."""

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from typing import TypeAlias

import torch

from vllm.logger import init_logger
from vllm.v1.capture.delivery.consumer_thread import Ending, SinkLane
from vllm.v1.capture.dispatch.request import CapturedRequest, RequestEnd
from vllm.v1.capture.dispatch.step_buffer import ByGroup, Pending
from vllm.v1.capture.dispatch.step_chain import StagedStep
from vllm.v1.capture.memory.row_copy import RowCopy, copy_rows
from vllm.v1.capture.staging.ring import Staging
from vllm.v1.capture.types import CaptureChunk

logger = init_logger(__name__)

PACKET_BYTES = 32 << 20
"""What requests that end together hand on in one packet, about."""

Arrival: TypeAlias = tuple[Sequence[StagedStep], "torch.cuda.Event | None"]
"""Steps, and what says that their rows are on the host."""

Work: TypeAlias = tuple[Sequence[Arrival], Callable[[], None]]
"""What has arrived, then what to do."""


class Dispatcher:
    """Owns the requests that are captured, on one thread, in the engine's order.

    The engine's thread only appends to its queue and opens requests; the amount of
    rows in the queue is bounded by staging memory, whose segments are released here.
    """

    def __init__(
        self,
        staging: Staging,
        lanes: Mapping[str, SinkLane],
        packet_bytes: int = PACKET_BYTES,
    ) -> None:
        """Start; a packet of `packet_bytes` and more gets no further request."""
        self._packet_bytes = packet_bytes
        self._lanes = lanes
        self._requests: dict[str, CapturedRequest] = {}
        self._pending = Pending(staging, self._requests)
        self._sent: list[Arrival] = []
        """Go with what is put into the queue next; of the engine's thread."""
        self._queue: SimpleQueue[Work | None] = SimpleQueue()
        """None is the last."""
        self._thread = threading.Thread(
            target=self._run, name="capture-dispatch", daemon=True
        )
        self._thread.start()

    def open(self, request: CapturedRequest) -> None:
        """A request whose rows will follow; no other has had its id."""
        self._requests[request.req_id] = request

    def steps(
        self, staged: Sequence[StagedStep], copied: torch.cuda.Event | None
    ) -> None:
        """The rows of steps, in order, once `copied` says that they are there.

        They wait until their requests end, or until `hand_on`: one of both follows,
        and the thread is woken only then.
        """
        self._sent.append((staged, copied))

    def hand_on(self, req_ids: Sequence[str] | None = None) -> None:
        """Let some requests have their rows that wait, or all of them.

        Then nothing waits any more, and the memory is given back.
        """
        if req_ids is None:
            self._put(lambda: self._hand_on(self._pending.take_all()))
        else:
            self._put(lambda: self._hand_on_to(req_ids))

    def end(self, ends: Sequence[RequestEnd]) -> None:
        """Ends of requests; every step that computed their rows came before."""
        self._put(lambda: self._finish(ends))

    def close(self, timeout: float) -> None:
        """Work off the queue, which ends with the ends of all requests."""
        self._put(lambda: None)
        self._queue.put(None)
        self._thread.join(timeout)
        if self._requests:
            logger.error(
                "The captured rows of %d requests were not handed on within %.0f s; "
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
            # Rows are missing now; each request that wanted them finds out
            # when it ends, because its rows do not add up.
            logger.exception("Captured rows could not be handed on")

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
        """Let requests have their rows; one packet of them for each instance.

        More packets would wake the instance's thread more often.
        """
        chunks: dict[str, list[CaptureChunk]] = {}
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

    def _submit(self, chunks: Mapping[str, Sequence[CaptureChunk]]) -> None:
        for instance, batch in chunks.items():
            self._lanes[instance].submit(batch)

    def _finish(self, ends: Sequence[RequestEnd]) -> None:
        """Hand on what is left of requests, several of them in one packet."""
        try:
            self._hand_on_to([end.request_id for end in ends])
        except Exception:  # They end all the same, and say what is missing.
            logger.exception("Captured rows could not be handed on")
        last = LastRows()
        for end in ends:
            request = self._requests.pop(end.request_id, None)
            try:
                if request is None:
                    end.never_started()
                else:
                    last.add(*request.finish(end))
            except Exception:  # The others' ends are as good as ever.
                logger.exception("The capture of %s has no end", end.request_id)
            if last.num_bytes >= self._packet_bytes:
                self._submit_last(last)
                last = LastRows()
        self._submit_last(last)

    def _submit_last(self, last: "LastRows") -> None:
        self._submit(last.chunks)
        for instance, ending in last.endings:
            self._lanes[instance].finish(ending)


class LastRows:
    """Requests' last chunks, and their ends, which come behind."""

    def __init__(self) -> None:
        self.chunks: dict[str, list[CaptureChunk]] = {}
        self.endings: list[tuple[str, Ending]] = []
        self.num_bytes = 0

    def add(
        self,
        chunks: Mapping[str, Sequence[CaptureChunk]],
        endings: Mapping[str, Ending],
    ) -> None:
        """Those of one more request, by instance."""
        for instance, batch in chunks.items():
            self.chunks.setdefault(instance, []).extend(batch)
            self.num_bytes += sum(chunk.tensor.nbytes for chunk in batch)
        self.endings.extend(endings.items())

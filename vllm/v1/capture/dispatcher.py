# SPDX-License-Identifier: Apache-2.0
"""From a step's staged rows to each consumer's chunks, off the engine's thread."""

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from vllm.logger import init_logger
from vllm.v1.capture.lane import SinkLane
from vllm.v1.capture.ledger import Rows
from vllm.v1.capture.request import CapturedRequest, RequestEnd
from vllm.v1.capture.rows import Block, TrueStarts
from vllm.v1.capture.staging import Segment, Staging
from vllm.v1.capture.types import CaptureChunk

logger = init_logger(__name__)


@dataclass(frozen=True, slots=True)
class StagedStep:
    """A step whose rows are in staging memory, or on their way to the host."""

    step: int
    blocks: Sequence[Block]
    segment: Segment
    copied: torch.cuda.Event | None
    true_starts: TrueStarts | None = None
    """Where the blocks' positions are only assumed."""


class Dispatcher:
    """Owns the requests that are captured, on one thread, in the engine's order.

    The engine's thread only appends to its queue; the amount of rows in the
    queue is bounded by staging memory, whose segments are released here.
    """

    def __init__(self, staging: Staging, lanes: Mapping[str, SinkLane]) -> None:
        self._staging = staging
        self._lanes = lanes
        self._requests: dict[str, CapturedRequest] = {}
        self._queue: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(
            target=self._run, name="capture-dispatch", daemon=True
        )
        self._thread.start()

    def open(self, request: CapturedRequest) -> None:
        """A request whose rows will follow."""
        self._put(lambda: self._requests.__setitem__(request.req_id, request))

    def step(self, staged: StagedStep) -> None:
        """A step's rows."""
        self._put(lambda: self._take(staged))

    def end(self, end: RequestEnd) -> None:
        """A request's end; every step that computed its rows came before."""
        self._put(lambda: self._finish(end))

    def close(self, timeout: float) -> None:
        """Work off the queue, which ends with the ends of all requests."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
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
        with self._changed:
            self._queue.append(work)
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                work = self._queue.popleft()
            try:
                work()
            except Exception:
                # Rows are missing now; each request that wanted them finds out
                # when it ends, because its rows do not add up.
                logger.exception("Captured rows could not be handed on")

    def _take(self, staged: StagedStep) -> None:
        chunks: dict[str, list[CaptureChunk]] = {}
        try:
            if staged.copied is not None:
                staged.copied.synchronize()
            base = staged.segment.start
            for block in staged.blocks:
                base = self._take_block(block, base, staged.step, chunks)
        finally:
            self._staging.ring.release(staged.segment)
        # One packet a step and instance: each wakes a thread.
        self._submit(chunks)

    def _take_block(
        self, block: Block, base: int, step: int, chunks: dict[str, list[CaptureChunk]]
    ) -> int:
        taps = len(block.columns)
        stop = base + taps * block.num_rows
        rows = self._staging.host_rows[base:stop].view(taps, block.num_rows, -1)
        offset = 0
        for pick in block.picks:
            request = self._requests.get(pick.req_id)
            if request is not None:
                # A copy of its own: rows that are kept must not keep those of others.
                part = rows[:, offset : offset + pick.num_rows].clone()
                settled = request.add(pick.group, Rows(pick.start, part, step))
                for instance, batch in settled.items():
                    chunks.setdefault(instance, []).extend(batch)
            offset += pick.num_rows
        return stop

    def _submit(self, chunks: Mapping[str, Sequence[CaptureChunk]]) -> None:
        for instance, batch in chunks.items():
            self._lanes[instance].submit(batch)

    def _finish(self, end: RequestEnd) -> None:
        request = self._requests.pop(end.request_id, None)
        if request is None:
            end.never_started()
            return
        chunks, endings = request.finish(end)
        self._submit(chunks)
        for instance, ending in endings.items():
            self._lanes[instance].finish(ending)

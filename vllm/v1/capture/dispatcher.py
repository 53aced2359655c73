# SPDX-License-Identifier: Apache-2.0
"""From a step's staged rows to each consumer's chunks, off the engine's thread."""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch

from vllm.logger import init_logger
from vllm.v1.capture.copying import Bytes, bytes_of, copy_all
from vllm.v1.capture.lane import Ending, SinkLane
from vllm.v1.capture.ledger import Rows
from vllm.v1.capture.placement import Placed
from vllm.v1.capture.request import CapturedRequest, RequestEnd
from vllm.v1.capture.rows import Block, Pick, TrueStarts
from vllm.v1.capture.staging import Segment, Staging
from vllm.v1.capture.types import CaptureChunk

logger = init_logger(__name__)


Taken: TypeAlias = tuple[CapturedRequest, int, Rows]
"""A request, one of its groups, and rows that it gets."""

PACKET_BYTES = 32 << 20
"""What requests that end together hand on in one packet, about."""
LARGEST_PART = 4
"""A request holds at most this many times the memory of its own rows."""


class StagedStep(NamedTuple):
    """A step whose rows are in staging memory, or on their way to the host."""

    step: int
    placed: Placed
    segment: Segment
    true_starts: TrueStarts | None = None
    """Where the positions are only assumed."""
    page: torch.Tensor | None = None  # [num_rows, hidden_size]
    """Where the rows are on the host, if not in the ring."""

    def continues(self, before: "StagedStep") -> bool:
        """Whether `before` is the same layout, one position earlier, just below."""
        return (
            self.true_starts is None
            and self.page is before.page is None
            and self.placed.layout is before.placed.layout
            and self.placed.shift == before.placed.shift + 1
            and self.segment.start == before.segment.start + before.segment.num_rows
        )


class Dispatcher:
    """Owns the requests that are captured, on one thread, in the engine's order.

    The engine's thread only appends to its queue; the amount of rows in the
    queue is bounded by staging memory, whose segments are released here.
    """

    def __init__(
        self,
        staging: Staging,
        lanes: Mapping[str, SinkLane],
        packet_bytes: int = PACKET_BYTES,
    ) -> None:
        """Start; a packet of `packet_bytes` and more gets no further request."""
        self._staging = staging
        self._packet_bytes = packet_bytes
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

    def steps(
        self, staged: Sequence[StagedStep], copied: torch.cuda.Event | None
    ) -> None:
        """The rows of steps, in order, once `copied` says that they are there."""
        self._put(lambda: self._take(staged, copied))

    def end(self, ends: Sequence[RequestEnd]) -> None:
        """Ends of requests; every step that computed their rows came before."""
        self._put(lambda: self._finish(ends))

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

    def _take(
        self, staged: Sequence[StagedStep], copied: torch.cuda.Event | None
    ) -> None:
        taken: list[Taken] = []
        copies: list[tuple[Bytes, Bytes]] = []
        try:
            if copied is not None:
                copied.synchronize()
            for run in runs(staged):
                self._take_run(run, taken, copies)
            copy_all(copies)
        finally:
            for step in staged:
                self._staging.ring.release(step.segment)
        chunks: dict[str, list[CaptureChunk]] = {}
        for request, group, rows in taken:
            for instance, batch in request.add(group, rows).items():
                chunks.setdefault(instance, []).extend(batch)
        # One packet for all of it and an instance: each wakes a thread.
        self._submit(chunks)

    def _take_run(
        self,
        run: Sequence[StagedStep],
        taken: list[Taken],
        copies: list[tuple[Bytes, Bytes]],
    ) -> None:
        """Rows of steps with one layout: each request's come together.

        Adds to `taken` what requests get, and to `copies` what must be copied first.
        """
        first, last = run[0], run[-1]
        layout, num_steps = first.placed.layout, len(run)
        rows = self._rows_of(run)
        # A run of several steps has none: its steps were known when they began.
        shifts = {} if first.true_starts is None else first.true_starts.shifts()
        base = 0
        for block in layout.blocks:
            stop = base + len(block.columns) * block.num_rows
            here = StagedBlock.of(block, rows[:, base:stop], first.page, base)
            offset = 0
            for pick in block.picks:
                request = self._requests.get(pick.req_id)
                if request is not None:
                    start = pick.start + first.placed.shift
                    start += shifts.get(pick.req_id, 0)
                    kept = here.keep(request, pick, offset, start, last.step, copies)
                    for part in settling(kept, num_steps, first.step):
                        taken.append((request, pick.group, part))
                offset += pick.num_rows
            base = stop

    def _rows_of(self, run: Sequence[StagedStep]) -> Bytes:
        """`[steps, staged rows of a step, bytes of a row]`."""
        first, num_rows = run[0], run[0].segment.num_rows
        if first.page is not None:
            return bytes_of(first.page)[None]
        start = first.segment.start
        staged = self._staging.host_bytes[start : start + len(run) * num_rows]
        return staged.reshape(len(run), num_rows, -1)

    def _submit(self, chunks: Mapping[str, Sequence[CaptureChunk]]) -> None:
        for instance, batch in chunks.items():
            self._lanes[instance].submit(batch)

    def _finish(self, ends: Sequence[RequestEnd]) -> None:
        """Hand on what is left of requests, several of them in one packet."""
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
                self._hand_on(last)
                last = LastRows()
        self._hand_on(last)

    def _hand_on(self, last: "LastRows") -> None:
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


@dataclass(frozen=True, slots=True)
class StagedBlock:
    """A block's rows of a run, on the host."""

    rows: Bytes  # [taps, steps, rows of the block, bytes of a row]
    page: torch.Tensor | None  # [taps, rows of the block, hidden_size]
    page_rows: int
    """Rows of the whole page."""

    @classmethod
    def of(
        cls, block: Block, rows: Bytes, page: torch.Tensor | None, base: int
    ) -> "StagedBlock":
        """From `rows`, `[steps, staged rows, bytes]`, which begin at `base`."""
        shape = len(block.columns), block.num_rows
        whole, size = 0, shape[0] * shape[1]
        if page is not None:
            whole, page = len(page), page[base : base + size].unflatten(0, shape)
        rows = rows.reshape(len(rows), *shape, rows.shape[-1]).swapaxes(0, 1)
        return cls(rows, page, whole)

    def keep(
        self,
        request: CapturedRequest,
        pick: Pick,
        offset: int,
        start: int,
        step: int,
        copies: list[tuple[Bytes, Bytes]],
    ) -> Rows:
        """What a request gets: the page itself, or what `copies` then says to copy.

        Who holds some rows of a page holds all of it, so a small part is copied.
        """
        own = pick.num_rows * len(self.rows)
        if self.page is not None and own * LARGEST_PART >= self.page_rows:
            return Rows(start, pick.num_rows, self.page, offset, step)
        staged = self.rows[:, :, offset : offset + pick.num_rows]
        rows, memory = request.place(pick.group, start, staged.shape, step)
        copies.append((memory, staged))
        return rows


def runs(staged: Sequence[StagedStep]) -> Iterator[Sequence[StagedStep]]:
    """The steps in order, with those together that continue each other."""
    run: list[StagedStep] = []
    for step in staged:
        if run and not step.continues(run[-1]):
            yield run
            run = []
        run.append(step)
    if run:
        yield run


def settling(rows: Rows, num_steps: int, first_step: int) -> Iterator[Rows]:
    """A run's rows as the ledger takes them: a step's rows settle those before."""
    if num_steps > 1:
        last = rows.stop - 1  # Each step of a longer run has one row.
        before = rows.between(rows.start, last)
        assert before is not None
        yield before._replace(step=first_step + num_steps - 2)
        after = rows.between(last, rows.stop)
        assert after is not None
        yield after
    else:
        yield rows

# SPDX-License-Identifier: Apache-2.0
"""The way of staged rows from the engine's thread to the packets of consumers.

`Dispatcher` decides, on the engine's thread, when rows are copied to the host and when
they are distributed to their requests, which is cheaper for many steps together.
`DispatchThread` distributes them.
"""

import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple, TypeAlias

import torch

from vllm.logger import init_logger
from vllm.v1.capture.delivery.consumer_thread import SinkLane
from vllm.v1.capture.delivery.packet_queue import Ending
from vllm.v1.capture.dispatch.held_rows import HeldRows, Settled
from vllm.v1.capture.dispatch.request import Answer, CapturedRequest, never_started
from vllm.v1.capture.dispatch.row_buffer import Rows
from vllm.v1.capture.dispatch.row_store import RowStore, StoredBlock
from vllm.v1.capture.dispatch.step_buffer import (
    ByGroup,
    Found,
    StagedStep,
    StepBuffer,
)
from vllm.v1.capture.groups import GroupChunk
from vllm.v1.capture.memory.buffer_pool import RowCopy, copy_rows
from vllm.v1.capture.staging.ring import Parts, Segment, Staging
from vllm.v1.residual.capture_plan import CaptureEnd
from vllm.v1.residual.capture_step import KeepRows, LoadRows, MoveRows, StoreChange

logger = init_logger(__name__)

STEPS_AT_ONCE = 128
"""Maximum number of steps whose rows are passed on together."""

BYTES_AT_ONCE = 4 << 20
"""Bytes per request that are passed on together.

Each time takes a request about 15 us of Python. What is left at its end delays its
result: the copies to the host, and from there to the request's own memory.
"""

SEND_BYTES = 32 << 20
"""Bytes from which on rows are copied to the host before all that waits is passed on.

A copy delays those that are started after it, such as that of a step's sampled tokens:
by 0.6 ms for so many bytes (PCIe, 52 GB/s), by 8 ms for those of 13 steps.
"""

PACKET_BYTES = 32 << 20
"""Approximate size of a packet with the last rows of requests that end together.

With a packet for each request, 64 that end at the same step with a row at 16 layers
take `filesystem` 1.9 ms of CPU time each instead of 1.1.
"""


class Arrival(NamedTuple):
    """What is being copied to the host."""

    steps: Sequence[StagedStep]
    copied: "torch.cuda.Event | None"
    """The event after which the rows are on the host; None if they are."""
    kept: Sequence[Found] = ()
    """Rows of earlier steps, which were held."""
    held_from: int | None = None
    """The first step with rows that are held still; None if that has not changed."""


Work: TypeAlias = Callable[[], object]
"""What the dispatch thread does after it has added steps."""


class Dispatcher:
    """Sends steps and the ends of requests to the dispatch thread.

    Used on the engine's thread only. `send` copies the rows of several steps to the
    host at once. They wait there until `hand_on`, or until their requests end. Unless
    a request ends, or a consumer wants the rows of each step, either is done when the
    next step begins: rows leave the device behind the tokens sampled from them.
    """

    def __init__(
        self,
        staging: Staging,
        lanes: Mapping[str, SinkLane],
        packet_bytes: int = PACKET_BYTES,
        store: RowStore | None = None,
    ) -> None:
        """Start the dispatch thread.

        Args:
            staging: the staging memory.
            lanes: the lane of each consumer instance.
            packet_bytes: no further request is added to a packet of at least this
                size.
            store: the rows of the activation store, if there is one.

        """
        self._staging = staging
        self._thread = DispatchThread(staging, lanes, packet_bytes, store)
        self._unsent: list[StagedStep] = []
        """Steps whose rows are not being copied yet."""
        self._unsent_rows = 0
        """Number of rows of these steps."""
        self._sent: list[Arrival] = []
        """Steps that go to the thread with its next work: it is woken only then."""
        self.held = HeldRows(staging)
        """The rows that are not sent with their steps."""
        self._steps = 0
        """Number of steps that were not handed on."""
        self._rows: Counter[int] = Counter()
        """Number of rows of these steps, by batch: those that alternate may be of very
        different sizes."""
        self._free_rows = 0
        """Number of staging rows of steps that held rows, and do not any more."""
        self._is_due = False
        """Whether these steps are handed on when the next one begins."""
        row_bytes = staging.host_rows[:1].nbytes
        self._most_rows = max(BYTES_AT_ONCE // row_bytes, 1)
        self._send_rows = max(SEND_BYTES // row_bytes, 1)

    def open(self, request: CapturedRequest) -> None:
        """Add a request whose rows will follow; its id must be new."""
        self._thread.requests[request.req_id] = request

    def change_store(self, changes: Sequence[StoreChange], step: int) -> None:
        """Change what the activation store has, before a step begins."""
        self.send()  # Rows of steps before may be loaded.
        self._put(partial(self._thread.change_store, changes, step))

    def reserve(self, num_rows: int) -> Segment:
        """Reserve staging rows for a step that begins; blocks until there is room."""
        ring = self._staging.ring
        if not self.held.is_empty:
            self._add_settled(self.held.settle())
        if self._is_due:
            self.hand_on()
        elif self._unsent_rows >= self._send_rows:
            self.send()
        segment = ring.reserve(num_rows, timeout=0.0)
        if segment is None:
            # Waiting steps occupy the ring and would not free it.
            self._add_settled(self.held.settle(ring.in_the_way(num_rows)))
            self.hand_on()
            segment = ring.reserve(num_rows)
        assert segment is not None
        return segment

    def add(
        self, step: StagedStep, at_once: Collection[str], parts: Parts = ()
    ) -> None:
        """Add a step that is queued on the device.

        Args:
            step: the step.
            at_once: requests whose rows are to be passed on with this step.
            parts: of the taps of a large step; see `Staging.to_pages`.

        """
        if step.placed.layout.num_held:
            self.held.add(step)
        if self._add_pages(step, parts):
            return
        self._unsent.append(step)
        self._steps += 1
        self._unsent_rows += step.sent.num_rows
        batch = step.placed.layout.batch
        self._rows[batch] += step.sent.num_rows
        self._is_due = (
            self._is_due
            or step.true_starts is not None  # It cannot join a chain of steps.
            or self._steps >= STEPS_AT_ONCE
            or self._rows.total() >= self._staging.ring.num_rows // 8
            or self._rows[batch] >= self._most_rows * _num_requests(step)
        )
        if at_once:
            self.send()
            self._put(partial(self._thread.hand_on, tuple(at_once)))

    def _add_pages(self, step: StagedStep, parts: Parts) -> bool:
        """Send a step of many rows alone, with the rows of prompts copied to pages."""
        blocks = step.placed.layout.sent
        sent = self._staging.to_pages(step.sent, blocks, parts)
        if sent is None:
            return False
        self.send()  # Keeps the order of steps.
        places, copied = sent
        self._sent.append(Arrival([step._replace(places=places)], copied))
        self._steps += 1
        self.hand_on()
        return True

    def lose(self, step: StagedStep) -> None:
        """Release the memory of a step that `add` has failed to send."""
        if any(step is one for one in self._unsent):
            return
        self.held.forget(step)
        self.send()  # Memory is released in the order of steps.
        self._put(partial(self._thread.lose, [step]))

    def send(self) -> None:
        """Start to copy the unsent steps to the host."""
        if not self._unsent:
            return
        steps, self._unsent = self._unsent, []
        self._unsent_rows = 0
        try:
            copied = self._staging.to_host([step.sent for step in steps])
        except Exception:
            # Each request detects its missing rows at its end.
            logger.exception("The rows of %d steps could not be copied", len(steps))
            self._put(partial(self._thread.lose, steps))
        else:
            self._sent.append(Arrival(steps, copied))

    def hand_on(self) -> None:
        """Have all rows distributed to their requests, which frees staging memory."""
        if self._steps or self._free_rows:
            self.send()
            self._put(self._thread.hand_on)
            self._steps = self._free_rows = 0
            self._rows.clear()
            self._is_due = False

    def end(self, ends: Sequence[tuple[CaptureEnd, Answer]]) -> None:
        """End requests; all steps that computed their rows were added before."""
        self.send()
        if not self.held.is_empty:
            self._add_settled(self.held.end(end for end, _ in ends))
            self._add_settled(self.held.settle())
        self._put(partial(self._thread.finish, ends))

    def leave_device(self) -> None:
        """Start to copy all rows that are on the device and may be kept."""
        self._add_settled(self.held.settle(None))
        self.send()

    def _add_settled(self, settled: Settled | None) -> None:
        if settled is None:
            return
        self.send()  # The thread must know a step before it is told about its rows.
        kept, copied, held_from, num_rows = settled
        self._sent.append(Arrival((), copied, kept, held_from))
        self._free_rows += num_rows
        if self._free_rows >= self._staging.ring.num_rows // 8:
            self._is_due = True

    def close(self, timeout: float) -> None:
        """Process the rest, for `timeout` seconds at most, and stop the thread.

        All requests must have been ended.
        """
        self._thread.close(timeout)

    def _put(self, work: Work) -> None:
        sent, self._sent = self._sent, []
        self._thread.put(sent, work)


def _num_requests(step: StagedStep) -> int:
    """The number of decoding requests, those with several groups counted as often."""
    blocks = step.placed.layout.blocks
    return max(sum([len(block.decoding) for block in blocks]), 1)


class DispatchThread:
    """Owns the captured requests and distributes the rows of steps to them.

    `put` and `close` are called on the engine's thread, which also adds to `requests`;
    the other methods run on this one. The rows in the queue are bounded by staging
    memory, whose segments are released here.
    """

    def __init__(
        self,
        staging: Staging,
        lanes: Mapping[str, SinkLane],
        packet_bytes: int,
        store: RowStore | None,
    ) -> None:
        """Start the thread; see `Dispatcher`."""
        self._packet_bytes = packet_bytes
        self._store = store
        self._width = staging.host_rows.shape[1]
        self.requests: dict[str, CapturedRequest] = {}
        """By id."""
        self._lanes = lanes
        self._pending = StepBuffer(staging, self.requests)
        self._queue: SimpleQueue[tuple[Sequence[Arrival], Work] | None] = SimpleQueue()
        """None ends the thread."""
        self._thread = threading.Thread(
            target=self._run, name="capture-dispatch", daemon=True
        )
        self._thread.start()

    def put(self, sent: Sequence[Arrival], work: Work) -> None:
        """Add steps, in order, and then do `work`."""
        self._queue.put((sent, work))

    def close(self, timeout: float) -> None:
        """Process the rest of the queue, for `timeout` seconds at most, and stop."""
        self._queue.put(None)
        self._thread.join(timeout)
        if self.requests:
            logger.error(
                "The captured rows of %d requests were not delivered within %.0f s; "
                "they are lost: %s",
                len(self.requests),
                timeout,
                sorted(self.requests)[:8],
            )

    def _run(self) -> None:
        while (item := self._next()) is not None:
            sent, work = item
            for arrival in sent:
                self._try(partial(self._arrive, arrival))
            self._try(work)

    def _next(self) -> tuple[Sequence[Arrival], Work] | None:
        """Wait for work, and copy to the activation store meanwhile."""
        store = self._store
        while store is not None and store.has_to_copy and self._queue.empty():
            self._try(store.copy_some)
        return self._queue.get()

    def _try(self, work: Work) -> None:
        try:
            work()
        except Exception:
            # Rows are missing now. Each request detects its missing rows at its end.
            logger.exception("Captured rows could not be distributed to their requests")

    def _arrive(self, arrival: Arrival) -> None:
        if arrival.held_from is not None:
            self._pending.held_from = arrival.held_from
        try:
            if arrival.copied is not None:
                arrival.copied.synchronize()
        except Exception:
            self.lose(arrival.steps)
            raise
        self._pending.add(arrival.steps)
        self._pending.keep(arrival.kept)

    def lose(self, staged: Sequence[StagedStep]) -> None:
        """Release the memory of steps whose rows cannot be copied, in their order."""
        self._pending.lose(staged)

    def hand_on(self, req_ids: Sequence[str] | None = None) -> None:
        """Distribute the waiting rows to their requests.

        Args:
            req_ids: only these requests; by default all, which frees the memory.

        """
        if req_ids is None:
            self._distribute(self._pending.take_all())
        else:
            self._distribute(self._pending.take(req_ids))

    def _distribute(self, pieces: Mapping[str, ByGroup]) -> None:
        """Give rows to their requests, and submit one packet to each instance.

        More packets would wake the instance's thread more often.
        """
        copies: list[RowCopy] = []
        try:
            taken = [
                (request, request.gather(own, copies))
                for req_id, own in pieces.items()
                if (request := self.requests.get(req_id)) is not None
            ]
            copy_rows(copies)
        finally:
            self._pending.release()
        self._add(taken)
        if self._store is not None:
            copies.clear()
            for request, parts in taken:
                for group, rows in parts:
                    request.store(group, rows, copies)
            self._store.copy_later(copies)

    def change_store(self, changes: Sequence[StoreChange], step: int) -> None:
        """Change what the activation store has; `step` is the one that begins."""
        for change in changes:
            self._try(partial(self._change_store, change, step))

    def _change_store(self, change: StoreChange, step: int) -> None:
        store, width = self._store, self._width
        assert store is not None, "there is no activation store"
        match change:
            case KeepRows():
                # Those of before a preemption may be of other vectors or weights.
                self.hand_on([change.request_id])
                self.requests[change.request_id].keep(change, store, width)
            case LoadRows():
                self._load(change, store, step)
            case MoveRows():
                self._move(change, store)

    def _load(self, asked: LoadRows, store: RowStore, step: int) -> None:
        """Give a request that begins its rows of cached blocks."""
        found = self._whole([number for *_, number in asked.places], store)
        # What it had computed before a preemption comes first.
        self.hand_on([asked.request_id])
        request = self.requests[asked.request_id]
        loaded = request.load(asked, found, self._width)
        self._add([(request, [(n, rows._replace(step=step)) for n, rows in loaded])])

    def _whole(
        self, numbers: Sequence[int], store: RowStore
    ) -> Mapping[int, StoredBlock]:
        """Those of some blocks that have all their rows, which may still wait."""
        found = store.whole(numbers)
        if len(found) < len(numbers):
            self.hand_on()
            found = store.whole(numbers)
        return found

    def _move(self, change: MoveRows, store: RowStore) -> None:
        if change.to == "disk" and self._whole([change.number], store):
            store.to_disk(change.number)
        else:
            store.drop(change.number)

    def _add(
        self, taken: Sequence[tuple[CapturedRequest, Sequence[tuple[int, Rows]]]]
    ) -> None:
        """Add rows of groups to their requests, and submit what is settled."""
        chunks: dict[str, list[GroupChunk]] = {}
        for request, parts in taken:
            for group, rows in parts:
                for instance, batch in request.add(group, rows).items():
                    chunks.setdefault(instance, []).extend(batch)
        self._submit(chunks)

    def _submit(self, chunks: Mapping[str, Sequence[GroupChunk]]) -> None:
        for instance, batch in chunks.items():
            self._lanes[instance].submit(batch)

    def finish(self, ends: Sequence[tuple[CaptureEnd, Answer]]) -> None:
        """Submit the last rows and the ends of requests, several in one packet."""
        try:
            kept: dict[bool, list[str]] = {True: [], False: []}
            for end, _ in ends:
                kept[self._keeps_rows(end)].append(end.request_id)
            if kept[False]:  # Rows that nobody gets are not copied.
                self._pending.take(kept[False])
            self.hand_on(kept[True])
        except Exception:  # The requests still end, and report missing rows.
            logger.exception("Captured rows could not be distributed to their requests")
        last = LastRows()
        for end, answer in ends:
            request = self.requests.pop(end.request_id, None)
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
        request = self.requests.get(end.request_id)
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

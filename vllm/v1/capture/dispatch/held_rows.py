# SPDX-License-Identifier: Apache-2.0
"""Rows that stay on the device until it is known whether they are kept.

A request whose consumers keep rows around tokens only (`keep_when` with the scope
`token`) needs few of them, but which is known some steps later: when the values of the
step are on the host, and those of the next `before` tokens. Until then the rows stay in
staging memory. Those that are kept are copied to the host, the others are not. A step
of 128 requests at 32 layers of width 4,096, on a CPU (median of four rounds): 1.4 ms of
CPU time of all threads instead of 20, without the copy from a device.

If a step finds no room in staging memory, or device memory is given up, rows that are
not settled yet are copied as well. They are dropped at the request's end.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from vllm.v1.capture.dispatch.row_buffer import Piece
from vllm.v1.capture.dispatch.step_buffer import Found, StagedStep, rows_in
from vllm.v1.capture.staging.ring import Pick, Segment, Staging
from vllm.v1.residual.capture_plan import CaptureEnd
from vllm.v1.residual.readout_plan import Fired
from vllm.v1.residual.spans import OPEN_END, Spans, absolute, merged
from vllm.v1.residual.step_view import StepView


@dataclass(slots=True)
class Reading:
    """A step whose values are being computed or copied."""

    stops: Sequence[tuple[str, int]]
    """Requests, and the position after the last token of each in the step."""
    fired: Fired | None = None
    """What its rules keep; None until that is known."""
    is_heard: bool = False
    """Whether `HeldRows` has taken it."""

    def tell(self, fired: Fired) -> None:
        """Say what the rules keep, on any thread."""
        self.fired = fired


class Settled(NamedTuple):
    """Rows that were held and are kept, and what is held still."""

    kept: list[Found]
    copied: torch.cuda.Event | None
    """The event after which they are on the host; None if they are."""
    held_from: int
    """The first step of which rows are held; `OPEN_END` if there is none."""
    num_rows: int
    """Staging rows of the steps that are settled."""


@dataclass(slots=True)
class HeldStep:
    """A step of which rows are held."""

    staged: StagedStep
    reading: Reading
    free: int
    """The first row of the host ring, within its segment, that no row was copied to."""


class HeldRows:
    """The held rows of all requests; for the engine's thread only."""

    def __init__(self, staging: Staging) -> None:
        """Start without requests."""
        self._staging = staging
        self.is_empty = True
        """Whether nothing is held, nor will be."""
        self._steps: deque[HeldStep] = deque()
        self._readings: deque[Reading] = deque()
        self._before: dict[str, int] = {}
        """By request: for how many further tokens a row waits."""
        self._known: dict[str, int] = {}
        """By request: the position below which it is known of each row if it is kept.

        Without those that have ended, and those of which no values are known yet.
        """
        self._windows: dict[str, Spans] = {}
        """By request: what is kept, as far as it is known."""

    def open(self, req_id: str, before: int) -> None:
        """Add a request that keeps rows up to `before` tokens before one that fires."""
        self.is_empty = False
        if not self._before:  # Values of other requests do not matter.
            self._readings.clear()
        self._before[req_id] = before

    def reading(self, view: StepView) -> Reading:
        """A step whose values will be told, whether or not it has held rows."""
        stops = (view.num_computed + view.num_scheduled).tolist()
        reading = Reading([*zip(view.req_ids, stops)])
        self._readings.append(reading)
        return reading

    def add(self, step: StagedStep) -> None:
        """Add a step with held rows, which has the last `reading`."""
        first = step.segment.start + step.sent.num_rows
        self._steps.append(HeldStep(step, self._readings[-1], first))

    def forget(self, step: StagedStep) -> None:
        """Remove the last step added, whose rows are lost."""
        if self._steps and self._steps[-1].staged is step:
            self._steps.pop()

    def settle(self, forced: Collection[Segment] | None = ()) -> Settled | None:
        """Copy what is kept of the steps for whose rows that is known.

        Args:
            forced: the segments of the oldest steps, of which all that may be kept is
                copied; None for those of all steps.

        Returns:
            None if no step is settled.

        """
        self._hear()
        found: list[Found] = []
        picks: list[Pick] = []
        num_rows = 0
        while self._steps:
            step = self._steps[0]
            if self._is_settled(step):
                own = self._take(step, self._windows)
            elif forced is None or step.staged.segment in forced:
                own = self._take(step, self._possible(step))
            else:
                break
            self._steps.popleft()
            found += own[0]
            picks += own[1]
            num_rows += step.staged.segment.num_rows
        self.is_empty = not self._before and not self._steps
        return self._settled(found, picks, num_rows) if num_rows else None

    def end(self, ends: Iterable[CaptureEnd]) -> Settled | None:
        """Copy what requests that end keep of their rows; None if that is nothing."""
        found: list[Found] = []
        picks: list[Pick] = []
        for end in ends:
            if self._before.pop(end.request_id, None) is None:
                continue
            self._known.pop(end.request_id, None)
            self._windows.pop(end.request_id, None)
            spans = merged(chain.from_iterable(end.kept.values()))
            for step in self._steps if spans else ():
                own = self._take(step, {end.request_id: spans})
                found += own[0]
                picks += own[1]
        return self._settled(found, picks, 0) if found else None

    def _settled(self, found: list[Found], picks: list[Pick], num_rows: int) -> Settled:
        held_from = self._steps[0].staged.step if self._steps else OPEN_END
        copied = self._staging.pick_to_host(picks)
        return Settled(found, copied, held_from, num_rows)

    def _hear(self) -> None:
        """Take the values that are known, in the order of steps."""
        while self._readings and self._readings[0].fired is not None:
            reading = self._readings.popleft()
            reading.is_heard = True
            for req_id, stop in reading.stops:
                wait = self._before.get(req_id)
                if wait is not None:
                    self._known[req_id] = stop - wait
            for req_id, start, stop in reading.fired or ():
                if req_id in self._before:
                    own = self._windows.get(req_id, ())
                    self._windows[req_id] = extended(own, start, stop)

    def _is_settled(self, step: HeldStep) -> bool:
        """Whether it is known of all rows of a step if they are kept."""
        if not self._before:
            return True
        # After a preemption later positions may be known of the time before it.
        if not step.reading.is_heard:
            return False
        known, shift = self._known, step.staged.placed.shift
        for block in step.staged.placed.layout.held:
            for req_id, row in block.decoding.items():
                if known.get(req_id, OPEN_END) <= row.origin + shift:
                    return False
            for req_id, _, start, num_rows, _ in block.picks:
                if known.get(req_id, OPEN_END) < start + num_rows:
                    return False
        return True

    def _possible(self, step: HeldStep) -> dict[str, Spans]:
        """What may be kept of the rows of a step that is not settled."""
        known = self._known if step.reading.is_heard else {}
        return {
            req_id: extended(own, max(known.get(req_id, 0), 0), OPEN_END)
            for req_id in self._before
            for own in [self._windows.get(req_id, ())]
        }

    def _take(
        self, step: HeldStep, kept: Mapping[str, Spans]
    ) -> tuple[list[Found], list[Pick]]:
        """The rows of a step at the positions kept by request, and those to copy."""
        found: list[Found] = []
        picks: list[Pick] = []
        staged, memory = step.staged, self._staging.host_rows
        base = staged.segment.start + staged.sent.num_rows
        for block in staged.placed.layout.held if kept else ():
            each, own = block.each, []
            for req_id, group, position, num_rows, place in rows_in(
                block, staged, kept.keys()
            ):
                stop = position + num_rows
                for part in absolute(kept[req_id], 0, position, stop):
                    first = place + part.start - position
                    own.append((req_id, group, part.start, part.stop, first))
            # Copies lie side by side, of each tap in turn. On a CPU there are none.
            size = sum([stop - start for _, _, start, stop, _ in own])
            in_place = self._staging.host_rows is self._staging.rows
            stride = (block.num_rows if in_place else size) * each
            at, first = 0, base if in_place else step.free
            for req_id, group, start, stop, place in own:
                piece = Piece(
                    start,
                    stop - start,
                    1,
                    staged.step,
                    memory,
                    first + (place if in_place else at) * each,
                    stride,
                    each,
                    block.width or memory.shape[1],
                )
                found.append((req_id, group, piece))
                at += stop - start
            if own and not in_place:
                rows = [np.arange(p, p + stop - start) for _, _, start, stop, p in own]
                taps = np.arange(len(block.columns))[:, None] * block.num_rows
                index = (taps + np.concatenate(rows))[..., None] * each
                index = base + (index + np.arange(each)).reshape(-1)
                picks.append((index, step.free))
                step.free += len(index)
            base += block.num_staged
        return found, picks


def extended(spans: Spans, start: int, stop: int) -> Spans:
    """The spans with one more, which is behind most of them unless it is recomputed."""
    if not spans or start > spans[-1][1]:
        return *spans, (start, stop)
    if start < spans[-1][0]:
        return merged((*spans, (start, stop)))
    first, last = spans[-1]
    return *spans[:-1], (first, max(last, stop))

# SPDX-License-Identifier: Apache-2.0
"""Staged rows on the host, until their requests get them.

While requests come and go, few steps have the same layout, and giving each request its
rows of each few steps would cost more than all else that is done for them. So rows
wait here until many steps have come together. A request that ends gets its own before.
"""

from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import torch

from vllm.v1.capture.pieces import Piece, Span
from vllm.v1.capture.placement import Placed
from vllm.v1.capture.rows import Block, TrueStarts
from vllm.v1.capture.staging import Segment, Staging

LARGEST_PART = 4
"""A request holds at most this many times the memory of its own rows."""

ByGroup: TypeAlias = defaultdict[int, list[Piece]]
"""A request's pieces in the order of their steps, by the number of their group."""


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


class Pending:
    """What waits, in order. Belongs to the dispatcher's thread."""

    def __init__(self, staging: Staging) -> None:
        """Begin with nothing; `staging` gets back what has been taken."""
        self._staging = staging
        self._run: list[StagedStep] = []
        """The last steps, which continue each other and are in no piece yet."""
        self._pieces: defaultdict[str, ByGroup] = new_pieces()
        self._segments: list[Segment] = []
        """Of all steps that have not been given back."""

    def add(self, staged: Iterable[StagedStep], known: Container[str]) -> None:
        """Steps whose rows are on the host, for the requests that are known."""
        for step in staged:
            self._segments.append(step.segment)
            if self._run and not step.continues(self._run[-1]):
                self._close_run(known)
            self._run.append(step)

    def lose(self, staged: Iterable[StagedStep]) -> None:
        """Steps whose rows did not come to the host: nobody gets them."""
        self._segments += [step.segment for step in staged]

    def take(self, req_ids: Sequence[str], known: Container[str]) -> dict[str, ByGroup]:
        """The pieces of some requests, as far as they are known; once."""
        if self._run and not self._run[0].placed.layout.req_ids.isdisjoint(req_ids):
            self._close_run(known)
        return {
            req_id: self._pieces.pop(req_id)
            for req_id in req_ids
            if req_id in self._pieces
        }

    def take_all(self, known: Container[str]) -> dict[str, ByGroup]:
        """The pieces of all requests that are known; once."""
        self._close_run(known)
        taken, self._pieces = self._pieces, new_pieces()
        return taken

    def release(self) -> None:
        """Give the memory back if nobody has rows in it that were not taken."""
        if self._pieces or self._run:
            return
        segments, self._segments = self._segments, []
        self._staging.ring.release(*segments)

    def _close_run(self, known: Container[str]) -> None:
        """Add the rows of the last steps to the pieces of their requests."""
        run, self._run = self._run, []
        if not run:
            return
        first = run[0]
        step_before = run[-2].step if len(run) > 1 else -1
        memory, base = self._staging.host_rows, first.segment.start
        if first.page is not None:
            memory, base = first.page, 0
        rows = first.segment.num_rows
        span = Span(len(run), run[-1].step, step_before, memory, rows)
        # A run of several steps has none: its steps were known when they began.
        shifts = {} if first.true_starts is None else first.true_starts.shifts()
        for block in first.placed.layout.blocks:
            taps, apart = len(block.columns), block.num_rows
            for (req_id, group, position, num_rows, _), offset in zip(
                block.picks, block.offsets
            ):
                if req_id not in known:
                    continue
                start = position + first.placed.shift
                if shifts:
                    start += shifts.get(req_id, 0)
                place = base + offset
                pieces = self._pieces[req_id][group]
                if (
                    pieces
                    and num_rows == 1
                    and pieces[-1].extend(span, start, place, apart)
                ):
                    continue
                piece = Piece(span, start, num_rows, place, apart, taps)
                if first.page is not None:
                    piece.page = kept(first.page, block, base, num_rows, offset)
                pieces.append(piece)
            base += taps * apart


def new_pieces() -> defaultdict[str, ByGroup]:
    """No pieces; who is asked for has none, of any group."""
    return defaultdict(partial(defaultdict, list))


def kept(
    page: torch.Tensor, block: Block, base: int, num_rows: int, offset: int
) -> tuple[torch.Tensor, int] | None:
    """A block of a page, and rows in it, for who gets enough of the page to keep it.

    Who holds some rows of a page holds all of it, so a small part is copied.
    """
    taps = len(block.columns)
    if num_rows * taps * LARGEST_PART < len(page):
        return None
    rows = page[base : base + taps * block.num_rows]
    return rows.unflatten(0, (taps, block.num_rows)), offset

# SPDX-License-Identifier: Apache-2.0
"""Chains of steps with the same shape, adjacent in memory.

A request that keeps its row index has rows at a constant stride in a chain, which are
one piece however many steps there are. Work is done only when a request gets or loses
its row index.
"""

from collections.abc import Collection, Container, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import torch

from vllm.v1.capture.dispatch.row_spans import Piece, Span
from vllm.v1.capture.staging.blocks import Block, BlockRow
from vllm.v1.capture.staging.request_pages import Places
from vllm.v1.capture.staging.ring import Segment
from vllm.v1.capture.staging.step_layout import PlacedStep
from vllm.v1.residual.step_view import TrueStarts

Found: TypeAlias = tuple[str, int, Piece]
"""A request, the index of its group, and a piece of its rows."""


class StagedStep(NamedTuple):
    """A step whose rows are in staging memory or being copied to the host."""

    step: int
    placed: PlacedStep
    segment: Segment
    true_starts: TrueStarts | None = None
    """The true positions, if those in `placed` are only assumed."""
    places: Places | None = None
    """The pages of prompts' rows that are not copied to the host ring."""

    @property
    def stands_alone(self) -> bool:
        """Whether the step cannot be part of a chain."""
        return (
            self.true_starts is not None
            or self.places is not None
            or any([block.picks for block in self.placed.layout.blocks])
        )


class Sitting(NamedTuple):
    """A request that has a row index in the current steps of a chain."""

    seat: BlockRow
    since: int
    """Index in the chain of the first step whose row was not taken."""


class StepChain:
    """A chain of steps, and since which step each request has had its row index."""

    def __init__(self, first: StagedStep, memory: torch.Tensor) -> None:
        """Start with one step.

        Args:
            first: a step that does not stand alone.
            memory: the host ring, `[rows, hidden_size]`.

        """
        self._first = self._last = first
        self._memory = memory
        self._sitting: list[dict[str, Sitting]] = [
            {req_id: Sitting(seat, 0) for req_id, seat in block.seated.items()}
            for block in first.placed.layout.blocks
        ]
        """By block, then by request."""

    @property
    def _length(self) -> int:
        return self._last.step - self._first.step + 1

    def follows(self, step: StagedStep) -> bool:
        """Whether a step continues the chain: same shape, and adjacent in memory."""
        last, layout = self._last, step.placed.layout
        return (
            step.segment.start == last.segment.start + last.segment.num_rows
            and step.placed.shift == last.placed.shift + 1
            and step.step == last.step + 1
            and not step.stands_alone
            and (layout is last.placed.layout or self._has_shape(layout.blocks))
        )

    def _has_shape(self, blocks: Sequence[Block]) -> bool:
        mine = self._first.placed.layout.blocks
        return len(blocks) == len(mine) and all(
            [
                block.columns == own.columns and block.num_rows == own.num_rows
                for block, own in zip(blocks, mine)
            ]
        )

    def add(self, step: StagedStep) -> list[Found]:
        """Append a step that `follows`.

        Returns:
            The rows of requests that have lost or changed their row index.

        """
        found: list[Found] = []
        layout, before = step.placed.layout, self._last.placed.layout
        if layout is not before:
            changed = layout.changed if layout.number == before.number + 1 else None
            for number, block in enumerate(layout.blocks):
                found.extend(self._change(number, block, changed))
        self._last = step
        return found

    def _change(
        self, number: int, block: Block, changed: Collection[str] | None
    ) -> Iterator[Found]:
        """Update the requests in `changed`, by default all, for a new layout."""
        sitting, length = self._sitting[number], self._length
        if changed is None:
            changed = sitting.keys() | block.seated.keys()
        for req_id in changed:
            had, seat = sitting.get(req_id), block.seated.get(req_id)
            if had is not None and had.seat is not seat:
                yield from self._take(number, req_id)
                del sitting[req_id]
                had = None
            if had is None and seat is not None:
                sitting[req_id] = Sitting(seat, length)

    def take(self, req_id: str) -> list[Found]:
        """Return the rows of a request that were not taken, and mark them taken."""
        return [
            found
            for number in range(len(self._sitting))
            for found in self._take(number, req_id)
        ]

    def take_all(self) -> list[Found]:
        """Return all rows that were not taken, and mark them taken."""
        return [
            found
            for number, sitting in enumerate(self._sitting)
            for req_id in sitting
            for found in self._take(number, req_id)
        ]

    def has_rows_of(self, known: Container[str]) -> bool:
        """Whether a request in `known` has rows that were not taken."""
        length = self._length
        return any(
            had.since < length and req_id in known
            for sitting in self._sitting
            for req_id, had in sitting.items()
        )

    def _take(self, number: int, req_id: str) -> Iterator[Found]:
        """The rows of a request in one block that were not taken."""
        had = self._sitting[number].get(req_id)
        length = self._length
        if had is None or had.since == length:
            return
        first, (seat, since) = self._first, had
        blocks = first.placed.layout.blocks
        block, rows = blocks[number], first.segment.num_rows
        before = sum([len(b.columns) * b.num_rows for b in blocks[:number]])
        last = self._last.step
        span = Span(length - since, last, last - 1, self._memory, rows)
        start = seat.origin + first.placed.shift + since
        place = first.segment.start + since * rows + before + seat.place
        piece = Piece(span, start, 1, place, block.num_rows, len(block.columns))
        self._sitting[number][req_id] = Sitting(seat, length)
        yield req_id, seat.group, piece

# SPDX-License-Identifier: Apache-2.0
"""Buffers staged rows on the host until they are distributed to their requests.

While requests start and end, only few consecutive steps have the same layout, and
distributing rows after every few steps would dominate the cost. Rows therefore wait
until many steps have accumulated. A request that ends gets its own rows earlier.

Steps of a batch that have the same shape, and lie at a constant stride in memory, form
a chain; those of several pipeline stages' batches alternate. A request that keeps its
row index has rows at a constant stride in a chain, which are one piece however many
steps there are. Work is done only when a request gets or loses its row index.
"""

from collections import defaultdict, deque
from collections.abc import Collection, Container, Iterable, Iterator, Sequence, Set
from functools import partial
from operator import attrgetter
from typing import NamedTuple, TypeAlias

import torch

from vllm.v1.capture.dispatch.row_buffer import Piece
from vllm.v1.capture.staging.request_pages import Places
from vllm.v1.capture.staging.ring import Segment, Staging
from vllm.v1.residual.row_blocks import Block, BlockRow
from vllm.v1.residual.spans import OPEN_END
from vllm.v1.residual.step_layout import PlacedStep
from vllm.v1.residual.step_view import TrueStarts

STEP = attrgetter("step")

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
    def sent(self) -> Segment:
        """The rows that are copied to the host as the step is added."""
        start, num_rows = self.segment
        return Segment(start, num_rows - self.placed.layout.num_held)

    @property
    def stands_alone(self) -> bool:
        """Whether the step cannot be part of a chain."""
        return (
            self.true_starts is not None
            or self.places is not None
            or any([block.picks for block in self.placed.layout.blocks])
        )


class ChainRow(NamedTuple):
    """A request that has a row index in the current steps of a chain."""

    block_row: BlockRow
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
        self._first = self._last = self._before = first
        self._length = 1
        """Number of steps."""
        self._stride = 0
        """Rows of `memory` between steps; 0 before the second one."""
        self._memory = memory
        self._by_request: list[dict[str, ChainRow]] = [
            {req_id: ChainRow(row, 0) for req_id, row in block.decoding.items()}
            for block in first.placed.layout.sent
        ]
        """By block, then by request."""

    def follows(self, step: StagedStep) -> bool:
        """Whether a step continues the chain: same shape, and at its stride."""
        last, layout = self._last, step.placed.layout
        stride = step.segment.start - last.segment.start
        return (
            stride > 0
            and stride == (self._stride or stride)
            and step.placed.shift == last.placed.shift + 1
            and not step.stands_alone
            and (layout is last.placed.layout or self._has_shape(layout.blocks))
        )

    def _has_shape(self, blocks: Sequence[Block]) -> bool:
        mine = self._first.placed.layout.blocks
        return len(blocks) == len(mine) and all(
            [
                block.columns == own.columns
                and block.num_rows == own.num_rows
                and block.held == own.held
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
            for number, block in enumerate(layout.sent):
                found.extend(self._change(number, block, changed))
        self._stride = step.segment.start - self._last.segment.start
        self._length += 1
        self._before, self._last = self._last, step
        return found

    def _change(
        self, number: int, block: Block, changed: Collection[str] | None
    ) -> Iterator[Found]:
        """Update the requests in `changed`, by default all, for a new layout."""
        by_request, length = self._by_request[number], self._length
        if changed is None:
            changed = by_request.keys() | block.decoding.keys()
        for req_id in changed:
            had, block_row = by_request.get(req_id), block.decoding.get(req_id)
            if had is not None and had.block_row is not block_row:
                yield from self._take(number, req_id)
                del by_request[req_id]
                had = None
            if had is None and block_row is not None:
                by_request[req_id] = ChainRow(block_row, length)

    def take(self, req_id: str) -> list[Found]:
        """Return the rows of a request that were not taken, and mark them taken."""
        return [
            found
            for number in range(len(self._by_request))
            for found in self._take(number, req_id)
        ]

    def take_all(self) -> list[Found]:
        """Return all rows that were not taken, and mark them taken."""
        return [
            found
            for number, by_request in enumerate(self._by_request)
            for req_id in by_request
            for found in self._take(number, req_id)
        ]

    def has_rows_of(self, known: Container[str]) -> bool:
        """Whether a request in `known` has rows that were not taken."""
        length = self._length
        return any(
            had.since < length and req_id in known
            for by_request in self._by_request
            for req_id, had in by_request.items()
        )

    def _take(self, number: int, req_id: str) -> Iterator[Found]:
        """The rows of a request in one block that were not taken."""
        had = self._by_request[number].get(req_id)
        length = self._length
        if had is None or had.since == length:
            return
        first, (block_row, since) = self._first, had
        blocks = first.placed.layout.blocks
        block, rows = blocks[number], self._stride
        before = sum([one.num_staged for one in blocks[:number]])
        place = first.segment.start + since * rows + before
        piece = Piece(
            block_row.origin + first.placed.shift + since,
            length - since,
            length - since,
            self._last.step,
            self._memory,
            place + block_row.place * block.each,
            block.num_rows * block.each,
            rows,
            block.width or self._memory.shape[1],
            step_before=self._before.step if length - since > 1 else None,
        )
        self._by_request[number][req_id] = ChainRow(block_row, length)
        yield req_id, block_row.group, piece


ByGroup: TypeAlias = defaultdict[int, list[Piece]]
"""The pieces of a request by group index, in the order of their steps."""


class StepBuffer:
    """The rows that wait, in order; used on the dispatch thread only."""

    def __init__(self, staging: Staging, known: Container[str]) -> None:
        """Start without rows.

        Args:
            staging: its segments are released once their rows were taken.
            known: the ids of open requests, updated by the caller; rows of others are
                dropped.

        """
        self._staging = staging
        self._known = known
        self._chains: dict[int, StepChain] = {}
        """The latest steps of each batch, if they form a chain."""
        self._pieces: defaultdict[str, ByGroup] = new_pieces()
        """By request: pieces of earlier steps, and those taken out of the chain."""
        self._segments: deque[tuple[int, Segment]] = deque()
        """The steps whose segments were not released."""
        self.held_from = OPEN_END
        """The first step with rows that are held on the device."""

    def add(self, staged: Iterable[StagedStep]) -> None:
        """Add steps whose rows are on the host."""
        for step in staged:
            self._segments.append((step.step, step.segment))
            if step.placed.layout.num_held:
                self.held_from = min(self.held_from, step.step)
            batch = step.placed.layout.batch
            chain = self._chains.get(batch)
            if chain is not None and chain.follows(step):
                self.keep(chain.add(step))
                continue
            if chain is not None:
                self.keep(self._chains.pop(batch).take_all())
            if step.stands_alone:
                self.keep(pieces_of(step, self._staging.host_rows))
            else:
                self._chains[batch] = StepChain(step, self._staging.host_rows)

    def lose(self, staged: Iterable[StagedStep]) -> None:
        """Add steps whose copy failed: only their segments are kept, for release."""
        self._segments += [(step.step, step.segment) for step in staged]

    def take(self, req_ids: Sequence[str]) -> dict[str, ByGroup]:
        """Remove and return the pieces of some requests."""
        for chain in self._chains.values():
            for req_id in req_ids:
                self.keep(chain.take(req_id))
        return in_order(
            {
                req_id: self._pieces.pop(req_id)
                for req_id in req_ids
                if req_id in self._pieces
            }
        )

    def take_all(self) -> dict[str, ByGroup]:
        """Remove and return the pieces of all requests."""
        for chain in self._chains.values():
            self.keep(chain.take_all())
        self._chains.clear()
        taken, self._pieces = self._pieces, new_pieces()
        return in_order(taken)

    def release(self) -> None:
        """Release segments, unless some still have rows that were not taken.

        Those from the first step on that has rows held on the device are kept.
        """
        chains = self._chains.values()
        if self._pieces or any(one.has_rows_of(self._known) for one in chains):
            return
        free = []
        while self._segments and self._segments[0][0] < self.held_from:
            free.append(self._segments.popleft()[1])
        self._staging.ring.release(*free)

    def keep(self, found: Iterable[Found]) -> None:
        """Add pieces of known requests."""
        for req_id, group, piece in found:
            if req_id in self._known:
                self._pieces[req_id][group].append(piece)


def pieces_of(step: StagedStep, host_rows: torch.Tensor) -> Iterator[Found]:
    """The pieces of a step that cannot be part of a chain, of rows that are sent."""
    base, places = step.segment.start, step.places or {}
    shifts = {} if step.true_starts is None else step.true_starts.shifts()
    for block in step.placed.layout.sent:
        for req_id, group, position, num_rows, offset in rows_in(block, step):
            piece = Piece(
                position + shifts.get(req_id, 0),
                num_rows,
                1,
                step.step,
                host_rows,
                base + offset * block.each,
                block.num_rows * block.each,
                block.each,
                block.width or host_rows.shape[1],
                places.get((req_id, group, position)),
            )
            yield req_id, group, piece
        base += block.num_staged


def rows_in(
    block: Block, step: StagedStep, req_ids: Set[str] | None = None
) -> Iterator[tuple[str, int, int, int, int]]:
    """Yields `(request, group, position, number of rows, index in the block)`.

    With `req_ids` those of these requests, which may be few in a large block.
    """
    decoding = block.decoding
    for req_id in decoding if req_ids is None else req_ids & decoding.keys():
        row = decoding[req_id]
        yield req_id, row.group, row.origin + step.placed.shift, 1, row.place
    for (req_id, group, position, num_rows, _), offset in zip(
        block.picks, block.offsets
    ):
        if req_ids is None or req_id in req_ids:
            yield req_id, group, position, num_rows, offset


def in_order(pieces: dict[str, ByGroup]) -> dict[str, ByGroup]:
    """The same, sorted: the steps of a request may be of several batches."""
    for by_group in pieces.values():
        for own in by_group.values():
            own.sort(key=STEP)
    return pieces


def new_pieces() -> defaultdict[str, ByGroup]:
    """An empty mapping of pieces by request and group."""
    return defaultdict(partial(defaultdict, list))

# SPDX-License-Identifier: Apache-2.0
"""Buffers staged rows on the host until they are distributed to their requests.

While requests start and end, only few consecutive steps have the same layout, and
distributing rows after every few steps would dominate the cost. Rows therefore wait
until many steps have accumulated. A request that ends gets its own rows earlier.
"""

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeAlias

import torch

from vllm.v1.capture.dispatch.row_spans import Piece, Span
from vllm.v1.capture.dispatch.step_chain import Found, StagedStep, StepChain
from vllm.v1.capture.staging.blocks import Block
from vllm.v1.capture.staging.ring import Segment, Staging

ByGroup: TypeAlias = defaultdict[int, list[Piece]]
"""The pieces of a request by group index, in the order of their steps."""


class Pending:
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
        self._chain: StepChain | None = None
        """The latest steps, if they form a chain."""
        self._pieces: defaultdict[str, ByGroup] = new_pieces()
        """By request: pieces of earlier steps, and those taken out of the chain."""
        self._segments: list[Segment] = []
        """The segments of all steps that were not released."""

    def add(self, staged: Iterable[StagedStep]) -> None:
        """Add steps whose rows are on the host."""
        for step in staged:
            self._segments.append(step.segment)
            if self._chain is not None and self._chain.follows(step):
                self._keep(self._chain.add(step))
                continue
            self._end_chain()
            if step.stands_alone:
                self._keep(apart(step, self._staging.host_rows))
            else:
                self._chain = StepChain(step, self._staging.host_rows)

    def lose(self, staged: Iterable[StagedStep]) -> None:
        """Add steps whose copy failed: only their segments are kept, for release."""
        self._segments += [step.segment for step in staged]

    def take(self, req_ids: Sequence[str]) -> dict[str, ByGroup]:
        """Remove and return the pieces of some requests."""
        if self._chain is not None:
            for req_id in req_ids:
                self._keep(self._chain.take(req_id))
        return {
            req_id: self._pieces.pop(req_id)
            for req_id in req_ids
            if req_id in self._pieces
        }

    def take_all(self) -> dict[str, ByGroup]:
        """Remove and return the pieces of all requests."""
        self._end_chain()
        taken, self._pieces = self._pieces, new_pieces()
        return taken

    def release(self) -> None:
        """Release all segments, unless some still hold rows that were not taken."""
        if self._pieces or (
            self._chain is not None and self._chain.has_rows_of(self._known)
        ):
            return
        segments, self._segments = self._segments, []
        self._staging.ring.release(*segments)

    def _end_chain(self) -> None:
        chain, self._chain = self._chain, None
        if chain is not None:
            self._keep(chain.take_all())

    def _keep(self, found: Iterable[Found]) -> None:
        for req_id, group, piece in found:
            if req_id in self._known:
                self._pieces[req_id][group].append(piece)


def apart(step: StagedStep, host_rows: torch.Tensor) -> Iterator[Found]:
    """The pieces of a step that cannot be part of a chain."""
    base, places = step.segment.start, step.places or {}
    span = Span(1, step.step, -1, host_rows, step.segment.num_rows)
    shifts = {} if step.true_starts is None else step.true_starts.shifts()
    for block in step.placed.layout.blocks:
        for req_id, group, position, num_rows, offset in rows_in(block, step):
            start = position + shifts.get(req_id, 0)
            taps, each = len(block.columns), block.num_rows
            piece = Piece(span, start, num_rows, base + offset, each, taps)
            piece.page = places.get((req_id, group, position))
            yield req_id, group, piece
        base += len(block.columns) * block.num_rows


def rows_in(block: Block, step: StagedStep) -> Iterator[tuple[str, int, int, int, int]]:
    """Yields `(request, group, position, number of rows, index in the block)`."""
    for req_id, seat in block.seated.items():
        yield req_id, seat.group, seat.origin + step.placed.shift, 1, seat.place
    for (req_id, group, position, num_rows, _), offset in zip(
        block.picks, block.offsets
    ):
        yield req_id, group, position, num_rows, offset


def new_pieces() -> defaultdict[str, ByGroup]:
    """An empty mapping of pieces by request and group."""
    return defaultdict(partial(defaultdict, list))

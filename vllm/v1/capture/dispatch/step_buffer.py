# SPDX-License-Identifier: Apache-2.0
"""Staged rows on the host, until their requests get them.

While requests come and go, few steps have the same layout, and giving each request its
rows of each few steps would cost more than all else that is done for them. So rows
wait here until many steps have come together. A request that ends gets its own before.
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
"""A request's pieces in the order of their steps, by the number of their group."""


class Pending:
    """What waits, in order. Belongs to the dispatcher's thread."""

    def __init__(self, staging: Staging, known: Container[str]) -> None:
        """Begin with nothing.

        Args:
            staging: gets back what has been taken.
            known: the requests that want their rows, now and later.

        """
        self._staging = staging
        self._known = known
        self._chain: StepChain | None = None
        """The last steps."""
        self._pieces: defaultdict[str, ByGroup] = new_pieces()
        """Of the steps before, and of requests that have lost their seats since."""
        self._segments: list[Segment] = []
        """Of all steps that have not been given back."""

    def add(self, staged: Iterable[StagedStep]) -> None:
        """Steps whose rows are on the host."""
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
        """Steps whose rows did not come to the host: nobody gets them."""
        self._segments += [step.segment for step in staged]

    def take(self, req_ids: Sequence[str]) -> dict[str, ByGroup]:
        """The pieces of some requests, as far as they are known; once."""
        if self._chain is not None:
            for req_id in req_ids:
                self._keep(self._chain.take(req_id))
        return {
            req_id: self._pieces.pop(req_id)
            for req_id in req_ids
            if req_id in self._pieces
        }

    def take_all(self) -> dict[str, ByGroup]:
        """The pieces of all requests that are known; once."""
        self._end_chain()
        taken, self._pieces = self._pieces, new_pieces()
        return taken

    def release(self) -> None:
        """Give the memory back if nobody has rows in it that were not taken."""
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
    """The rows of a step that is in no chain."""
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
    """`(request, group, position, number of rows, place in the block)` of all rows."""
    for req_id, seat in block.seated.items():
        yield req_id, seat.group, seat.origin + step.placed.shift, 1, seat.place
    for (req_id, group, position, num_rows, _), offset in zip(
        block.picks, block.offsets
    ):
        yield req_id, group, position, num_rows, offset


def new_pieces() -> defaultdict[str, ByGroup]:
    """No pieces; who is asked for has none, of any group."""
    return defaultdict(partial(defaultdict, list))

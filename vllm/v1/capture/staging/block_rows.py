# SPDX-License-Identifier: Apache-2.0
"""Row indices of decoding requests: a request keeps its row of a block at each step.

A request that ends frees its index, and the next one to start gets it, so that all
others keep theirs and their rows of many steps lie at equal distances. A free index is
a row of staging memory that nothing writes. A change costs time for the requests that
start or end, and none for the others.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TypeAlias

from vllm.v1.capture.staging.blocks import Block, BlockRow, Pick, rows_of

Columns: TypeAlias = tuple[int, ...]

MOST_EMPTY = 8
"""Indices that may be free, or a quarter of all, before they are numbered anew."""


class RowIndices:
    """The row indices of one block, with a free list."""

    __slots__ = ("_free", "number", "of")

    def __init__(self) -> None:
        self.of: dict[str, BlockRow] = {}
        """By request."""
        self.number = 0
        """How many there are, free ones included."""
        self._free: list[int] = []

    def take(self, req_id: str, group: int, origin: int) -> None:
        """Give a request an index, the one that it has if it has one."""
        before = self.of.get(req_id)
        if before is not None:
            if before.origin == origin:
                return
            place = before.place
        elif self._free:
            place = self._free.pop()
        else:
            place = self.number
            self.number += 1
        self.of[req_id] = BlockRow(group, origin, place)

    def leave(self, req_id: str) -> None:
        """Free the index of a request, if it has one."""
        seat = self.of.pop(req_id, None)
        if seat is not None:
            self._free.append(seat.place)

    def compact(self) -> None:
        """Number the requests anew, without free indices."""
        if self._free:
            self.of = {
                req_id: BlockRow(seat.group, seat.origin, place)
                for place, (req_id, seat) in enumerate(self.of.items())
            }
            self.number, self._free = len(self.of), []

    @property
    def is_sparse(self) -> bool:
        """Whether more indices are free than may be."""
        return len(self._free) > max(MOST_EMPTY, self.number // 4)


class BlockRows:
    """The row indices of requests that had one token in the last step, by block."""

    def __init__(self, most_rows: int) -> None:
        """`most_rows`: of a step; indices stay free only where it has fewer."""
        self._most_rows = most_rows
        self._indices: dict[Columns, RowIndices] = {}

    def change(self) -> None:
        """Indices will change; blocks that were given out stay as they are."""
        for indices in self._indices.values():
            indices.of = indices.of.copy()

    def take(self, columns: Columns, req_id: str, group: int, origin: int) -> None:
        """A request has a row of this block in this step."""
        indices = self._indices.get(columns)
        if indices is None:
            indices = self._indices[columns] = RowIndices()
        indices.take(req_id, group, origin)

    def leave(self, columns: Columns, req_id: str) -> None:
        """The request has no row of this block any more."""
        if columns in self._indices:
            self._indices[columns].leave(req_id)

    def leave_all(self, req_id: str) -> None:
        """The request has no row of any block any more."""
        for indices in self._indices.values():
            indices.leave(req_id)

    def blocks(self, picked: Mapping[Columns, Sequence[Pick]]) -> tuple[Block, ...]:
        """The blocks of a step: decoding requests first, then the rows in `picked`."""
        for indices in self._indices.values():
            if indices.is_sparse:
                indices.compact()
        blocks = self._blocks(picked)
        if rows_of(blocks) > self._most_rows:
            for indices in self._indices.values():
                indices.compact()
            blocks = self._blocks(picked)
        return blocks

    def _blocks(self, picked: Mapping[Columns, Sequence[Pick]]) -> tuple[Block, ...]:
        # A block without a decoding request is forgotten.
        self._indices = {
            c: indices for c, indices in self._indices.items() if indices.of
        }
        blocks = [
            block(columns, indices, picked.get(columns, ()))
            for columns, indices in self._indices.items()
        ]
        for columns, picks in picked.items():
            if columns not in self._indices:
                blocks.append(block(columns, NO_INDICES, picks))
        return tuple(blocks)


NO_INDICES = RowIndices()


def block(columns: Columns, indices: RowIndices, picks: Sequence[Pick]) -> Block:
    """The rows of decoding requests, then the picks one after the other."""
    if not picks:
        return Block(columns, indices.of, (), (), indices.number)
    *offsets, end = accumulate([pick[3] for pick in picks], initial=indices.number)
    return Block(columns, indices.of, picks, offsets, end)

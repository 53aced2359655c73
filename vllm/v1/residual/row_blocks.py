# SPDX-License-Identifier: Apache-2.0
"""Selects the rows that a step captures and lays them out in staging memory.

At every tap the tokens of a step are the rows of a tensor `[num_tokens, hidden_size]`.
The rows that the requests' plans select are laid out as blocks `[taps, rows]`. All
requests that read the same taps share a block, so that the work per step does not grow
with the number of layers.

A decoding request keeps the same row index in every step, so that its rows of many
steps lie at a constant stride in staging memory. The index of a request that ends is
reused for the next one that starts. An unused index is a staging row that nothing
writes. Work is done only for the requests that start or end.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, TypeAlias

from vllm.v1.residual.capture_plan import READOUTS, CapturePlan, Reader
from vllm.v1.residual.spans import Spans, overlap
from vllm.v1.residual.tap import Tap

Columns: TypeAlias = tuple[int, ...]
"""Indices of taps among those of this process."""

BlockKey: TypeAlias = tuple[Columns, bool]
"""What identifies a block: its columns, and whether its rows are held."""

MOST_EMPTY = 8
"""Row indices are compacted if more than this many, and a quarter, are free."""


@dataclass(frozen=True, slots=True)
class LocalGroup:
    """A group of a plan, reduced to the taps of this process."""

    taps: tuple[Tap, ...]
    columns: Columns
    """Index of each tap among the taps of this process."""
    ranges: Spans
    readers: tuple[Reader, ...]
    """The readers that rows are delivered to; empty if only readouts use the rows."""
    width: int = 0
    """Numbers per row, if other than in the stream."""
    held: bool = False
    """Whether rows stay on the device until it is known which of them are kept."""

    @property
    def block(self) -> BlockKey:
        """The block that has its rows."""
        return self.columns, self.held


def local_groups(
    plan: CapturePlan, columns: Mapping[Tap, int], may_hold: bool = False
) -> tuple[LocalGroup, ...]:
    """The groups of `plan`, reduced to the taps in `columns`; empty ones are dropped.

    Args:
        plan: of a request.
        columns: index of each tap among the taps of this process.
        may_hold: whether rows that all readers keep around tokens only are held.

    """
    groups = []
    holding = plan.keeping_tokens if may_hold else frozenset()
    for group in plan.groups:
        taps = tuple(tap for tap in group.taps if tap in columns)
        if taps:
            where = tuple(columns[tap] for tap in taps)
            readers = tuple(r for r in group.readers if r.instance != READOUTS)
            held = bool(readers) and holding.issuperset(r.instance for r in readers)
            groups.append(
                LocalGroup(taps, where, group.ranges, readers, group.width, held)
            )
    return tuple(groups)


Pick: TypeAlias = tuple[str, int, int, int, int]
"""Consecutive rows of one request that a step captures for one group.

`(request, group, position, number of rows, row)`: `group` is the index among the
request's local groups, `position` the (assumed) token position of the first row, `row`
its index in the step's tensors. A plain tuple for speed: a step has many.
"""


class BlockRow(NamedTuple):
    """The row of a decoding request within a block."""

    group: int
    """Index among the request's local groups."""
    origin: int
    """The row's token position minus the step number, which is constant."""
    place: int
    """Row index in the block."""


class Block(NamedTuple):
    """Rows of a step at the same taps: `[len(columns), num_rows]`.

    A row that is wider than the stream takes several staging rows, one that is narrower
    the beginning of one. The taps of a block are of one width.
    """

    columns: Columns
    """Index of each tap among the taps of this process."""
    decoding: Mapping[str, BlockRow]
    """By request: the rows of requests that have one token in the step."""
    picks: Sequence[Pick]
    """Rows of requests that have several tokens in the step."""
    offsets: Sequence[int]
    """For each pick, the index of its first row in the block."""
    num_rows: int
    """Rows per tap, including unused ones."""
    each: int = 1
    """Staging rows that a row takes."""
    width: int = 0
    """Numbers per row, if other than in the stream."""
    held: bool = False
    """As of its groups."""

    @property
    def num_staged(self) -> int:
        """Staging rows of the block."""
        return len(self.columns) * self.num_rows * self.each


def pick_rows(
    req_id: str, groups: Sequence[LocalGroup], start: int, count: int, row: int
) -> Iterator[tuple[BlockKey, Pick]]:
    """Select the captured rows of a request that has several tokens in a step.

    Args:
        req_id: the request.
        groups: its local groups.
        start: position of its first token in the step.
        count: number of its tokens in the step.
        row: index of its first token in the step's tensors.

    Yields:
        What identifies the block, and the pick.

    """
    for number, group in enumerate(groups):
        for first, last in overlap(group.ranges, start, start + count):
            pick = req_id, number, first, last - first, row + first - start
            yield group.block, pick


def rows_of(blocks: Sequence[Block]) -> int:
    """The number of staging rows that `blocks` use."""
    return sum([block.num_staged for block in blocks])


class RowIndices:
    """The row indices of one block, with a free list."""

    __slots__ = ("_free", "number", "of")

    def __init__(self) -> None:
        self.of: dict[str, BlockRow] = {}
        """The row of each request."""
        self.number = 0
        """The number of indices, including free ones."""
        self._free: list[int] = []

    def take(self, req_id: str, group: int, origin: int) -> None:
        """Assign an index to a request; it keeps the one that it has."""
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

    def free(self, req_id: str) -> None:
        """Free the index of a request, if it has one."""
        block_row = self.of.pop(req_id, None)
        if block_row is not None:
            self._free.append(block_row.place)

    def compact(self) -> None:
        """Renumber the requests so that no index is free."""
        if self._free:
            self.of = {
                req_id: BlockRow(block_row.group, block_row.origin, place)
                for place, (req_id, block_row) in enumerate(self.of.items())
            }
            self.number, self._free = len(self.of), []

    @property
    def is_sparse(self) -> bool:
        """Whether so many indices are free that they should be compacted."""
        return len(self._free) > max(MOST_EMPTY, self.number // 4)


class BlockRows:
    """The row indices, by block, of requests that had one token in the last step."""

    def __init__(
        self, most_rows: int, widths: Mapping[int, tuple[int, int]] | None = None
    ) -> None:
        """Start without requests.

        Args:
            most_rows: staging rows that a step may use. If free indices make it
                exceed them, the indices are compacted.
            widths: `each` and `width` of a `Block`, by the column of a tap whose rows
                are not as wide as the stream.

        """
        self._most_rows = most_rows
        self._widths = widths or {}
        self._indices: dict[BlockKey, RowIndices] = {}

    def unshare(self) -> None:
        """Copy the indices before they change: blocks of earlier steps share them."""
        for indices in self._indices.values():
            indices.of = indices.of.copy()

    def take(self, key: BlockKey, req_id: str, group: int, origin: int) -> None:
        """Assign a row of the block to a request.

        Args:
            key: of the block.
            req_id: the request.
            group: index among the request's local groups.
            origin: see `BlockRow`.

        """
        indices = self._indices.get(key)
        if indices is None:
            indices = self._indices[key] = RowIndices()
        indices.take(req_id, group, origin)

    def free(self, key: BlockKey, req_id: str) -> None:
        """Free the request's row of the block."""
        if key in self._indices:
            self._indices[key].free(req_id)

    def free_all(self, req_id: str) -> None:
        """Free the request's rows of all blocks."""
        for indices in self._indices.values():
            indices.free(req_id)

    def blocks(self, picked: Mapping[BlockKey, Sequence[Pick]]) -> tuple[Block, ...]:
        """The blocks of a step, each with decoding requests first, then its picks.

        Those whose rows are held are the last ones.
        """
        for indices in self._indices.values():
            if indices.is_sparse:
                indices.compact()
        blocks = self._blocks(picked)
        if rows_of(blocks) > self._most_rows:
            for indices in self._indices.values():
                indices.compact()
            blocks = self._blocks(picked)
        return blocks

    def _blocks(self, picked: Mapping[BlockKey, Sequence[Pick]]) -> tuple[Block, ...]:
        # Drop blocks without a decoding request.
        self._indices = {
            key: indices for key, indices in self._indices.items() if indices.of
        }
        blocks = [
            block(key, indices, picked.get(key, ()))
            for key, indices in self._indices.items()
        ]
        for key, picks in picked.items():
            if key not in self._indices:
                blocks.append(block(key, NO_INDICES, picks))
        if self._widths:
            blocks = [self._sized(one) for one in blocks]
        return tuple(sorted(blocks, key=lambda one: one.held))

    def _sized(self, block: Block) -> Block:
        each, width = self._widths.get(block.columns[0], (1, 0))
        return block._replace(each=each, width=width)


NO_INDICES = RowIndices()


def block(key: BlockKey, indices: RowIndices, picks: Sequence[Pick]) -> Block:
    """A block with the rows of decoding requests, followed by the picks."""
    columns, held = key
    *offsets, end = accumulate([pick[3] for pick in picks], initial=indices.number)
    return Block(columns, indices.of, picks, offsets, end, held=held)

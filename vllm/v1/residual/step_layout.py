# SPDX-License-Identifier: Apache-2.0
"""The layout of each step's captured rows, updated incrementally.

While the same requests decode one token each, consecutive steps differ only in
positions and in the staging segment. Such a step reuses the last layout with a shift.
If requests start or end, only these are processed.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from vllm.v1.residual.row_blocks import (
    Block,
    BlockRows,
    Columns,
    LocalGroup,
    Pick,
    pick_rows,
    rows_of,
)
from vllm.v1.residual.spans import OPEN_END, contains
from vllm.v1.residual.step_view import Decoding, StepView


@dataclass(frozen=True, slots=True)
class Layout:
    """The captured rows of a step: blocks `[taps, rows]`, one after the other."""

    blocks: tuple[Block, ...]
    num_rows: int
    """Staging rows that the step uses."""
    columns: range
    """The range of taps from the lowest to the highest captured one."""
    launches: frozenset[int]
    """Addresses of the ops that must launch, as in `Launch`."""
    row_of: Mapping[str, int]
    """By decoding request, the index of its token in the step's tensors."""
    num_tokens: int
    """Tokens of the step, without padding."""
    number: int
    """Counts the layouts."""
    changed: Collection[str]
    """Requests whose row index may differ from that in the previous layout.

    If the sizes of the blocks differ, any may.
    """


class PlacedStep(NamedTuple):
    """The layout of a step, and the number that turns origins into positions."""

    layout: Layout
    shift: int
    """The step number: a row's token position is its origin plus this."""


class StepLayout:
    """Lays out the rows of the captured requests, step by step.

    Used on the engine's thread only.
    """

    def __init__(
        self,
        addresses: Sequence[int],
        most_rows: int,
        widths: Mapping[int, tuple[int, int]] | None = None,
    ) -> None:
        """Start without requests.

        Args:
            addresses: for each tap, the address that identifies its op.
            most_rows: staging rows that a step may use.
            widths: as of `BlockRows`.

        """
        self._addresses = addresses
        self._block_rows = BlockRows(most_rows, widths)
        self._groups: dict[str, tuple[LocalGroup, ...]] = {}
        self._step = 0
        self._number = 0
        """The number of the last layout."""
        self._layout: Layout | None = None
        self._decoding: Decoding | None = None
        """The last step, if the next one may reuse its layout."""
        self._origins: dict[str, int | None] = {}
        """The origins of all requests that had one token in the last step.

        None for a request that must be processed again.
        """
        self._until = OPEN_END
        """The first step at which a range of one of them starts or ends."""

    def __contains__(self, req_id: str) -> bool:
        return req_id in self._groups

    @property
    def is_empty(self) -> bool:
        """Whether no request is captured."""
        return not self._groups

    def add(self, req_id: str, groups: tuple[LocalGroup, ...]) -> None:
        """Add a captured request."""
        self._groups[req_id] = groups
        self._invalidate(req_id)

    def groups_of(self, req_id: str) -> tuple[LocalGroup, ...]:
        """The groups of a request that was added."""
        return self._groups[req_id]

    def remove(self, req_id: str) -> None:
        """Remove a request."""
        self._groups.pop(req_id, None)
        self._invalidate(req_id)

    def _invalidate(self, req_id: str) -> None:
        if req_id in self._origins:
            self._origins[req_id] = self._decoding = None

    def place(self, view: StepView) -> PlacedStep | None:
        """Lay out a step; None if no row of it is captured."""
        self._step += 1
        if not self._groups:
            return None
        if not self._continues(view):
            self._place_anew(view)
        return None if self._layout is None else PlacedStep(self._layout, self._step)

    def _continues(self, view: StepView) -> bool:
        return (
            self._decoding is not None
            and self._step < self._until
            and view.true_starts is None
            and self._decoding.continues(view)
        )

    def _place_anew(self, view: StepView) -> None:
        row_of, picked, changed = self._assign_rows(view)
        blocks = self._block_rows.blocks(picked)
        self._number += 1
        self._layout = self._laid_out(view, blocks, row_of, changed) if blocks else None
        decodes = len(row_of) == len(view.req_ids) and view.true_starts is None
        self._decoding = Decoding(view) if decodes else None

    def _assign_rows(
        self, view: StepView
    ) -> tuple[dict[str, int], dict[Columns, list[Pick]], set[str]]:
        """Assign row indices to requests with one token, and pick the rows of others.

        Returns:
            For requests with one token, the index of that token in the step's tensors;
            the picks of the others by block; the requests whose index may have changed.

        """
        step, before = self._step, self._origins
        if step >= self._until:
            before, self._until = dict.fromkeys(before), OPEN_END
        counts = view.num_scheduled.tolist()
        row_of = dict(zip(view.req_ids, accumulate(counts, initial=0)))
        origins = dict(zip(view.req_ids, (view.num_computed - step).tolist()))
        picked: defaultdict[Columns, list[Pick]] = defaultdict(list)
        for req_id, count in zip(view.req_ids, counts):
            if count != 1:
                start, row = origins.pop(req_id) + step, row_of.pop(req_id)
                groups = self._groups.get(req_id, ())
                for columns, pick in pick_rows(req_id, groups, start, count, row):
                    picked[columns].append(pick)
        new = [one for one in origins.items() if before.get(one[0]) != one[1]]
        left = before.keys() - origins.keys()
        self._update_rows(left, new)
        # If positions are only assumed, the next step cannot be compared with this one.
        known = view.true_starts is None
        self._origins = origins if known else dict.fromkeys(origins)
        return row_of, picked, left.union([req_id for req_id, _ in new])

    def _update_rows(
        self, left: Collection[str], new: Sequence[tuple[str, int]]
    ) -> None:
        block_rows, step = self._block_rows, self._step
        block_rows.unshare()
        for req_id in left:
            block_rows.free_all(req_id)
        for req_id, origin in new:
            position = origin + step
            groups = self._groups.get(req_id)
            if groups is None:
                block_rows.free_all(req_id)
                continue
            for number, group in enumerate(groups):
                if contains(group.ranges, position):
                    block_rows.take(group.columns, req_id, number, origin)
                else:
                    block_rows.free(group.columns, req_id)
            changes = step + 1 + steps_alike(groups, position)
            self._until = min(self._until, changes)

    def _laid_out(
        self,
        view: StepView,
        blocks: tuple[Block, ...],
        row_of: Mapping[str, int],
        changed: Collection[str],
    ) -> Layout:
        last = self._layout
        if last is not None and [b.columns for b in last.blocks] == [
            b.columns for b in blocks
        ]:
            columns, launches = last.columns, last.launches
        else:
            every = {column for block in blocks for column in block.columns}
            columns = range(min(every), max(every) + 1)
            launches = frozenset(self._addresses[column] for column in every)
        return Layout(
            blocks,
            rows_of(blocks),
            columns,
            launches,
            row_of,
            sum(view.num_scheduled.tolist()),
            self._number,
            changed,
        )


def steps_alike(groups: Sequence[LocalGroup], position: int) -> int:
    """How many positions after `position` are captured by the same groups as it."""
    nearest = OPEN_END
    for group in groups:
        for start, stop in group.ranges:
            if position < start < nearest:
                nearest = start
            elif position < stop < nearest:
                nearest = stop
    return nearest - (position + 1)

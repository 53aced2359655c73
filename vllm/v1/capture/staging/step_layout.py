# SPDX-License-Identifier: Apache-2.0
"""Where the rows of each step go, at little cost for a step like the one before.

While the same requests decode, one token each, a step differs from the last in
nothing but positions and the place in staging memory. Such a step is not planned
anew: its layout is the last one's, shifted. Where some requests come or go, only
these are looked at.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vllm.v1.capture.plan import OPEN_END, contains
from vllm.v1.capture.staging.block_rows import BlockRows, Columns
from vllm.v1.capture.staging.blocks import (
    Block,
    LocalGroup,
    Pick,
    assign_slots,
    no_slots,
    pick_rows,
    rows_of,
)
from vllm.v1.residual.step_view import Decoding, StepView


@dataclass(frozen=True, slots=True)
class Layout:
    """A step's rows: its blocks, one after the other, each `[taps, rows]`."""

    blocks: tuple[Block, ...]
    num_rows: int
    """Staging rows that the step takes."""
    columns: range
    """Of the taps, and of what lies between them."""
    launches: frozenset[int]
    """The ops that must launch, as in `Launch`."""
    row_of: Mapping[str, int]
    """Where in the step's tensors the row of each decoding request is."""
    num_tokens: int
    """Of the step."""
    number: int
    changed: Collection[str]
    """Requests whose row index may differ from that in the layout with the number
    before; all may if the blocks have other sizes."""

    def slots(self, columns: range, num_rows: int) -> npt.NDArray[np.int32]:
        """The slots `[len(columns), num_rows]` of some taps, all of these among them.

        Counted from the step's first staging row; -1 where nothing is captured.
        """
        slots = no_slots(len(columns), num_rows)
        assign_slots(self.blocks, self.row_of, slots, columns.start)
        return slots


class PlacedStep(NamedTuple):
    """One step's layout, and what the origins of its rows are counted from."""

    layout: Layout
    shift: int
    """To be added to the origins of the layout's rows."""


class StepLayout:
    """The requests that are captured, and where a step's rows of them go."""

    def __init__(self, addresses: Sequence[int], most_rows: int) -> None:
        """Begin with no request.

        Args:
            addresses: what the op of each tap is known by.
            most_rows: staging rows that a step may take.

        """
        self._addresses = addresses
        self._seating = BlockRows(most_rows)
        self._groups: dict[str, tuple[LocalGroup, ...]] = {}
        self._step = 0
        self._number = 0
        """Of the layout."""
        self._layout: Layout | None = None
        self._decoding: Decoding | None = None
        """The last step, if the next may be like it."""
        self._origins: dict[str, int | None] = {}
        """Of all requests that had one token in the last step; None where a request
        must be looked at."""
        self._until = OPEN_END
        """The step from which on one of them may have other rows than before."""

    def __contains__(self, req_id: str) -> bool:
        return req_id in self._groups

    @property
    def is_empty(self) -> bool:
        """Whether there is no request."""
        return not self._groups

    def add(self, req_id: str, groups: tuple[LocalGroup, ...]) -> None:
        """A request is captured from now on."""
        self._groups[req_id] = groups
        self._look_at(req_id)

    def remove(self, req_id: str) -> None:
        """It is not any more."""
        self._groups.pop(req_id, None)
        self._look_at(req_id)

    def _look_at(self, req_id: str) -> None:
        if req_id in self._origins:
            self._origins[req_id] = self._decoding = None

    def place(self, view: StepView) -> PlacedStep | None:
        """What a step captures, None where no plan selects a row of it."""
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
            and self._decoding.goes_on(view)
        )

    def _place_anew(self, view: StepView) -> None:
        row_of, picked, changed = self._seat(view)
        blocks = self._seating.blocks(picked)
        self._number += 1
        self._layout = self._laid_out(view, blocks, row_of, changed) if blocks else None
        decodes = len(row_of) == len(view.req_ids) and view.true_starts is None
        self._decoding = Decoding(view) if decodes else None

    def _seat(
        self, view: StepView
    ) -> tuple[dict[str, int], dict[Columns, list[Pick]], set[str]]:
        """Let those sit who have one token, where they did; the others' rows.

        Also gives, for the former, their rows in the step's tensors; and whose seats
        may have changed.
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
        come = [one for one in origins.items() if before.get(one[0]) != one[1]]
        gone = before.keys() - origins.keys()
        self._change_seats(gone, come)
        # Where positions are only assumed, nobody is known to go on.
        known = view.true_starts is None
        self._origins = origins if known else dict.fromkeys(origins)
        return row_of, picked, gone.union([req_id for req_id, _ in come])

    def _change_seats(
        self, gone: Collection[str], come: Sequence[tuple[str, int]]
    ) -> None:
        seating, step = self._seating, self._step
        seating.change()
        for req_id in gone:
            seating.leave_all(req_id)
        for req_id, origin in come:
            position = origin + step
            groups = self._groups.get(req_id)
            if groups is None:
                seating.leave_all(req_id)
                continue
            for number, group in enumerate(groups):
                if contains(group.ranges, position):
                    seating.take(group.columns, req_id, number, origin)
                else:
                    seating.leave(group.columns, req_id)
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
    """How many positions after `position` every group treats as it treats this one."""
    nearest = OPEN_END
    for group in groups:
        for start, stop in group.ranges:
            if position < start < nearest:
                nearest = start
            elif position < stop < nearest:
                nearest = stop
    return nearest - (position + 1)

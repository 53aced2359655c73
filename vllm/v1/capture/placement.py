# SPDX-License-Identifier: Apache-2.0
"""Where the rows of each step go, at little cost for a step like the one before.

While the same requests decode, one token each, a step differs from the last in
nothing but positions and the place in staging memory. Such a step is not planned
anew: its layout is the last one's, shifted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vllm.v1.capture.plan import OPEN_END
from vllm.v1.capture.rows import (
    Block,
    Decoding,
    LocalGroup,
    StepView,
    assign_slots,
    no_slots,
    pick_rows,
    rows_of,
)
from vllm.v1.capture.seating import Seating


@dataclass(frozen=True, slots=True)
class Layout:
    """A step's rows: its blocks, one after the other, each `[taps, rows]`."""

    blocks: tuple[Block, ...]
    num_rows: int
    """Staging rows that the step takes."""
    launches: frozenset[int]
    """The ops that must launch, as in `Launch`."""
    slots: npt.NDArray[np.int32]  # [taps, rows of the step without padding]
    """Counted from the step's first staging row; -1 where nothing is captured."""
    req_ids: frozenset[str]
    """Of the picks."""


class Placed(NamedTuple):
    """One step's layout, and how far its requests have moved on since it was made."""

    layout: Layout
    shift: int
    """To be added to the positions of the layout's picks."""


class Placement:
    """The requests that are captured, and where a step's rows of them go."""

    def __init__(self, addresses: Sequence[int], most_rows: int) -> None:
        """Begin with no request.

        Args:
            addresses: what the op of each tap is known by.
            most_rows: staging rows that a step may take.

        """
        self._addresses = addresses
        self._seating = Seating(most_rows)
        self._groups: dict[str, tuple[LocalGroup, ...]] = {}
        self._last: Placed | None = None
        self._decoding: Decoding | None = None
        """The last step, if the next may be like it."""
        self._steps_left = 0
        """How many more such steps would capture the same taps of the same requests."""

    def __contains__(self, req_id: str) -> bool:
        return req_id in self._groups

    def add(self, req_id: str, groups: tuple[LocalGroup, ...]) -> None:
        """A request is captured from now on."""
        self._groups[req_id] = groups
        self._steps_left = 0

    def remove(self, req_id: str) -> None:
        """It is not any more."""
        self._groups.pop(req_id, None)
        if self._decoding is not None and self._decoding.has(req_id):
            self._steps_left = 0

    def place(self, view: StepView) -> Placed | None:
        """What a step captures, None where no plan selects a row of it."""
        if not self._groups:
            return None
        if self._continues(view):
            self._steps_left -= 1
            if self._last is not None:
                self._last = Placed(self._last.layout, self._last.shift + 1)
            return self._last
        blocks = self._seating.blocks(pick_rows(view, self._groups))
        self._last = Placed(self._layout(view, blocks), 0) if blocks else None
        self._remember(view)
        return self._last

    def _layout(self, view: StepView, blocks: tuple[Block, ...]) -> Layout:
        slots = no_slots(len(self._addresses), sum(view.num_scheduled.tolist()))
        assign_slots(blocks, slots)
        columns = {column for block in blocks for column in block.columns}
        launches = frozenset(self._addresses[column] for column in columns)
        req_ids = frozenset([pick[0] for block in blocks for pick in block.picks])
        return Layout(blocks, rows_of(blocks), launches, slots, req_ids)

    def _continues(self, view: StepView) -> bool:
        return (
            self._steps_left > 0
            and view.true_starts is None
            and self._decoding is not None
            and self._decoding.goes_on(view)
        )

    def _remember(self, view: StepView) -> None:
        """Whether, and how long, the steps that follow may be like this one."""
        self._steps_left = 0
        if view.true_starts is not None or not view.only_decodes:
            return
        self._decoding = Decoding(view)
        self._steps_left = OPEN_END
        for req_id, position in zip(view.req_ids, view.num_computed.tolist()):
            groups = self._groups.get(req_id)
            if groups:
                self._steps_left = min(self._steps_left, steps_alike(groups, position))


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

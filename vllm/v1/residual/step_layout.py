# SPDX-License-Identifier: Apache-2.0
"""The layout of each step's captured rows, updated incrementally.

While the same requests decode one token each, consecutive steps differ only in
positions and in the staging segment. Such a step reuses the last layout with a shift.
If requests start or end, only these are processed. Pipeline stages have as many batches
in flight, whose steps alternate; each batch has its own last layout.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from vllm.v1.residual.row_blocks import (
    Block,
    BlockKey,
    BlockRows,
    LocalGroup,
    Pick,
    pick_rows,
    rows_of,
)
from vllm.v1.residual.spans import OPEN_END, contains
from vllm.v1.residual.step_view import Decoding, StepView

if TYPE_CHECKING:
    from vllm.config import VllmConfig


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
    sent: tuple[Block, ...]
    """The blocks whose rows are copied to the host."""
    held: tuple[Block, ...]
    """The others, which are the last ones: their rows stay on the device at first."""
    num_held: int
    """Staging rows of these."""

    @property
    def batch(self) -> int:
        """Which of the batches that alternate it belongs to."""
        return self.number // LAYOUTS


class PlacedStep(NamedTuple):
    """The layout of a step, and the number that turns origins into positions."""

    layout: Layout
    shift: int
    """The number of the batch's step: a row's position is its origin plus this."""


def num_alternating(vllm_config: "VllmConfig") -> int:
    """How many batches may alternate: with one pipeline stage there is one batch."""
    stages = vllm_config.parallel_config.pipeline_parallel_size
    return vllm_config.max_concurrent_batches if stages > 1 else 1


LAYOUTS = 1 << 40
"""More than the layouts of a batch; those of several batches have distinct numbers."""


class StepLayout:
    """Lays out the rows of the captured requests, step by step.

    Used on the engine's thread only.
    """

    def __init__(
        self,
        addresses: Sequence[int],
        most_rows: int,
        widths: Mapping[int, tuple[int, int]] | None = None,
        num_batches: int = 1,
    ) -> None:
        """Start without requests.

        Args:
            addresses: for each tap, the address that identifies its op.
            most_rows: staging rows that a step may use.
            widths: as of `BlockRows`.
            num_batches: how many batches, of different requests, may alternate.

        """
        self._groups: dict[str, tuple[LocalGroup, ...]] = {}
        self._batches = [
            BatchLayout(
                self._groups, addresses, BlockRows(most_rows, widths), LAYOUTS * number
            )
            for number in range(num_batches)
        ]
        """By their last step."""

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

    def remove(self, req_id: str) -> None:
        """Remove a request."""
        self._groups.pop(req_id, None)
        self._invalidate(req_id)

    def _invalidate(self, req_id: str) -> None:
        for one in self._batches:
            one.invalidate(req_id)

    def place(self, view: StepView) -> PlacedStep | None:
        """Lay out a step; None if no row of it is captured."""
        batches = self._batches
        if not self._groups:
            batches[0].skip()
            return None
        for batch in batches:
            if batch.continues(view):
                break
        else:
            req_ids = {*view.req_ids}
            batch = max(batches, key=lambda one: one.num_common(req_ids))
            batch.place_anew(view)
        batches.remove(batch)
        batches.append(batch)
        return batch.placed


class BatchLayout:
    """Lays out the steps of one batch."""

    def __init__(
        self,
        groups: Mapping[str, tuple[LocalGroup, ...]],
        addresses: Sequence[int],
        block_rows: BlockRows,
        number: int,
    ) -> None:
        """Start before the first step.

        Args:
            groups: of all captured requests, by id; kept up to date by the caller.
            addresses: as of `StepLayout`.
            block_rows: the row indices.
            number: of layouts before the first one.

        """
        self._addresses = addresses
        self._block_rows = block_rows
        self._groups = groups
        self._step = 0
        self._number = number
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

    @property
    def placed(self) -> PlacedStep | None:
        """The last step; None if no row of it is captured."""
        return None if self._layout is None else PlacedStep(self._layout, self._step)

    def invalidate(self, req_id: str) -> None:
        """Process a request again, which is new or has ended."""
        if req_id in self._origins:
            self._origins[req_id] = self._decoding = None

    def num_common(self, req_ids: Set[str]) -> int:
        """How many of these requests had one token in the last step."""
        return len(req_ids & self._origins.keys())

    def skip(self) -> None:
        """Count a step in which nothing is captured."""
        self._step += 1

    def continues(self, view: StepView) -> bool:
        """Whether a step has the last layout; if so, it is the last step now."""
        same = (
            self._decoding is not None
            and self._step + 1 < self._until
            and view.true_starts is None
            and self._decoding.continues(view)
        )
        self._step += same
        return same

    def place_anew(self, view: StepView) -> None:
        """Lay out a step that does not continue the last one."""
        self._step += 1
        row_of, picked, changed = self._assign_rows(view)
        blocks = self._block_rows.blocks(picked)
        self._number += 1
        self._layout = self._laid_out(view, blocks, row_of, changed) if blocks else None
        decodes = len(row_of) == len(view.req_ids) and view.true_starts is None
        self._decoding = Decoding(view) if decodes else None

    def _assign_rows(
        self, view: StepView
    ) -> tuple[dict[str, int], dict[BlockKey, list[Pick]], set[str]]:
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
        picked: defaultdict[BlockKey, list[Pick]] = defaultdict(list)
        for req_id, count in zip(view.req_ids, counts):
            if count != 1:
                start, row = origins.pop(req_id) + step, row_of.pop(req_id)
                groups = self._groups.get(req_id, ())
                for key, pick in pick_rows(req_id, groups, start, count, row):
                    picked[key].append(pick)
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
                    block_rows.take(group.block, req_id, number, origin)
                else:
                    block_rows.free(group.block, req_id)
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
        held = tuple([block for block in blocks if block.held])
        return Layout(
            blocks,
            rows_of(blocks),
            columns,
            launches,
            row_of,
            sum(view.num_scheduled.tolist()),
            self._number,
            changed,
            blocks[: len(blocks) - len(held)],
            held,
            rows_of(held),
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

# SPDX-License-Identifier: Apache-2.0
"""Selects the rows that a step captures and lays them out in staging memory.

At every tap the tokens of a step are the rows of a tensor `[num_tokens, hidden_size]`.
The rows that the requests' plans select are laid out as blocks `[taps, rows]`. All
requests that read the same taps share a block, so that the work per step does not grow
with the number of layers.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from vllm.v1.capture.plan import READOUTS, CapturePlan, Ranges, Reader, Tap, overlap


@dataclass(frozen=True, slots=True)
class LocalGroup:
    """A group of a plan, reduced to the taps of this process."""

    taps: tuple[Tap, ...]
    columns: tuple[int, ...]
    """Index of each tap among the taps of this process."""
    ranges: Ranges
    readers: tuple[Reader, ...]
    """The readers that rows are delivered to; empty if only readouts use the rows."""


def local_groups(
    plan: CapturePlan, columns: Mapping[Tap, int]
) -> tuple[LocalGroup, ...]:
    """The groups of `plan`, reduced to the taps in `columns`; empty ones are dropped.

    Args:
        plan: of a request.
        columns: index of each tap among the taps of this process.

    """
    groups = []
    for group in plan.groups:
        taps = tuple(tap for tap in group.taps if tap in columns)
        if taps:
            where = tuple(columns[tap] for tap in taps)
            readers = tuple(r for r in group.readers if r.instance != READOUTS)
            groups.append(LocalGroup(taps, where, group.ranges, readers))
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
    """Rows of a step at the same taps: staging rows `[len(columns), num_rows]`."""

    columns: tuple[int, ...]
    """Index of each tap among the taps of this process."""
    seated: Mapping[str, BlockRow]
    """By request: the rows of requests that have one token in the step."""
    picks: Sequence[Pick]
    """Rows of requests that have several tokens in the step."""
    offsets: Sequence[int]
    """For each pick, the index of its first row in the block."""
    num_rows: int
    """Rows per tap, including unused ones."""


def pick_rows(
    req_id: str, groups: Sequence[LocalGroup], start: int, count: int, row: int
) -> Iterator[tuple[tuple[int, ...], Pick]]:
    """Select the captured rows of a request that has several tokens in a step.

    Args:
        req_id: the request.
        groups: its local groups.
        start: position of its first token in the step.
        count: number of its tokens in the step.
        row: index of its first token in the step's tensors.

    Yields:
        The columns that identify the block, and the pick.

    """
    for number, group in enumerate(groups):
        for first, last in overlap(group.ranges, start, start + count):
            pick = req_id, number, first, last - first, row + first - start
            yield group.columns, pick


def assign_slots(
    blocks: Sequence[Block],
    row_of: Mapping[str, int],
    slots: npt.NDArray[np.int32],  # [some taps of this process, num_rows]
    first_column: int = 0,
) -> None:
    """Write the staging row of each selected token into `slots`.

    Staging rows count from the first one of the step. Each block is laid out as
    `[taps, rows]`, the blocks one after the other.

    Args:
        blocks: of the step.
        row_of: by decoding request, the index of its token in the step's tensors.
        slots: written; its first row belongs to the tap `first_column`.
        first_column: at most the lowest column of the blocks.

    """
    base = 0
    for block in blocks:
        rows = [row_of[req_id] for req_id in block.seated]
        places = [seat.place for seat in block.seated.values()]
        for (*_, count, row), offset in zip(block.picks, block.offsets):
            rows.extend(range(row, row + count))
            places.extend(range(offset, offset + count))
        taps = len(block.columns)
        if taps == 1:
            slots[block.columns[0] - first_column, rows] = [base + at for at in places]
            base += block.num_rows
            continue
        columns, firsts = _bases(block.columns, block.num_rows, base)
        slots[columns - first_column, rows] = firsts + places
        base += taps * block.num_rows


@lru_cache(maxsize=8)
def _bases(
    columns: tuple[int, ...], num_rows: int, base: int
) -> tuple[npt.NDArray[np.integer], npt.NDArray[np.integer]]:
    """A block's columns, and the first staging row of each; both `[columns, 1]`."""
    stop = base + len(columns) * num_rows
    return np.array(columns)[:, None], np.arange(base, stop, num_rows)[:, None]


def no_slots(num_taps: int, num_rows: int) -> npt.NDArray[np.int32]:
    """Slots `[num_taps, num_rows]` that are all -1 (all bits set): nothing is captured.

    Made from a `bytearray`, because `np.full` would release the GIL.
    """
    memory = bytearray(b"\xff") * (4 * num_taps * num_rows)
    return np.frombuffer(memory, dtype=np.int32).reshape(num_taps, num_rows)


def rows_of(blocks: Sequence[Block]) -> int:
    """The number of staging rows that `blocks` use."""
    return sum(len(block.columns) * block.num_rows for block in blocks)

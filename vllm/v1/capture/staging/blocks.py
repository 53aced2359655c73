# SPDX-License-Identifier: Apache-2.0
"""Which rows of a step are captured, and where in staging memory each goes.

A step's tokens are the rows of one tensor `[num_tokens, hidden_size]` at every
tap. This module finds, for the requests that have a plan, the rows that their
plans select, and lays them out as blocks `[taps, rows]`: one block for all
requests that read the same taps, so that the work per step does not grow with
the number of layers.
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
    """A plan's group, as far as its taps are in this process."""

    taps: tuple[Tap, ...]
    columns: tuple[int, ...]
    """Index of each tap among the taps of this process."""
    ranges: Ranges
    readers: tuple[Reader, ...]
    """Those who are handed rows; none where they are read out on the device only."""


def local_groups(
    plan: CapturePlan, columns: Mapping[Tap, int]
) -> tuple[LocalGroup, ...]:
    """The groups of `plan`, reduced to the taps that `columns` has."""
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

`(request, group, position, number of rows, row)`: the group's index among the request's
local groups, the first row's token position as far as it is known, and where the rows
begin in the step's tensors. A plain tuple, as there are many in each step.
"""


class BlockRow(NamedTuple):
    """Where in a block the row of a decoding request goes, and which row that is."""

    group: int
    """Index among the request's local groups."""
    origin: int
    """The row's token position less the number of the step: both grow by one."""
    place: int


class Block(NamedTuple):
    """Rows that are read at the same taps: `[len(columns), num_rows]` of staging."""

    columns: tuple[int, ...]
    seated: Mapping[str, BlockRow]
    """By request: those that have a row of a step of one token."""
    picks: Sequence[Pick]
    """Rows of steps of several tokens."""
    offsets: Sequence[int]
    """Where each pick's rows begin in the block."""
    num_rows: int
    """Some may be nobody's."""


def pick_rows(
    req_id: str, groups: Sequence[LocalGroup], start: int, count: int, row: int
) -> Iterator[tuple[tuple[int, ...], Pick]]:
    """What a step of some tokens of a request captures, with the columns of the taps.

    Its first token is at position `start`, and in the step's tensors at `row`.
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
    """Write each selected row's staging row into `slots`, counted from the step's.

    The rows of a block lie as `[taps, rows]`, the blocks one after the other.

    Args:
        blocks: of the step.
        row_of: where in the step's tensors the row of each request is that has a seat.
        slots: begins with the taps of `first_column`.
        first_column: the lowest of the blocks, or one below.

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
    """A block's columns, and where each one's rows begin; both `[columns, 1]`."""
    stop = base + len(columns) * num_rows
    return np.array(columns)[:, None], np.arange(base, stop, num_rows)[:, None]


def no_slots(num_taps: int, num_rows: int) -> npt.NDArray[np.int32]:
    """Slots in which nothing is captured: -1, all bits of which are set.

    NumPy would let go of the interpreter's lock to fill them.
    """
    memory = bytearray(b"\xff") * (4 * num_taps * num_rows)
    return np.frombuffer(memory, dtype=np.int32).reshape(num_taps, num_rows)


def rows_of(blocks: Sequence[Block]) -> int:
    """How many staging rows `blocks` take."""
    return sum(len(block.columns) * block.num_rows for block in blocks)

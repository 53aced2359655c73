# SPDX-License-Identifier: Apache-2.0
"""Finds the rows of each readout among a step's staged rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from vllm.v1.residual.row_blocks import Block, LocalGroup
from vllm.v1.residual.spans import OPEN_END, Spans
from vllm.v1.residual.step_layout import Layout
from vllm.v1.residual.tap import Tap

Indices: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Staged:
    """The rows of one group of taps of a request in a step."""

    positions: Indices
    """`[n]`: token position of each row, ascending."""
    rows: Indices
    """`[n]`: index at the group's first tap of the (first) staging row of each row."""
    stride: int
    """Offset from the rows of one tap to those of the next."""
    each: int = 1
    """Staging rows that a row takes."""


def staged_groups(
    layout: Layout, shift: int, wanted: Mapping[str, object]
) -> dict[str, dict[int, Staged]]:
    """The staged rows of requests with readouts, by request and group.

    Args:
        layout: the step's layout.
        shift: added to the positions in the layout.
        wanted: requests with readouts, by id.

    """
    spans: dict[str, dict[int, list[tuple[int, int, int, Block]]]] = {}
    base = 0
    for block in layout.blocks:
        for req_id, row in block.decoding.items():
            if req_id in wanted:
                one = row.origin + shift, 1, base + block.each * row.place, block
                spans.setdefault(req_id, {}).setdefault(row.group, []).append(one)
        for (req_id, group, start, count, _), at in zip(block.picks, block.offsets):
            if req_id in wanted:
                one = start, count, base + block.each * at, block
                spans.setdefault(req_id, {}).setdefault(group, []).append(one)
        base += block.num_staged
    return {
        req_id: {group: _joined(found) for group, found in by_group.items()}
        for req_id, by_group in spans.items()
    }


def _joined(spans: Sequence[tuple[int, int, int, Block]]) -> Staged:
    ordered = sorted(spans, key=itemgetter(0))
    block = ordered[0][3]
    each = block.each
    positions = [np.arange(start, start + n) for start, n, _, _ in ordered]
    rows = [np.arange(row, row + each * n, each) for _, n, row, _ in ordered]
    stride = block.num_rows * each
    return Staged(np.concatenate(positions), np.concatenate(rows), stride, each)


def rows_at(
    taps: Sequence[Tap],
    ranges: Spans,
    groups: Sequence[LocalGroup],
    staged: Mapping[int, Staged],
) -> tuple[Indices, Indices]:
    """The positions `[n]` within `ranges`, and their rows `[n, taps]` in the step.

    A row that takes several staging rows has as many columns.

    A tap is staged at every position that any of its readouts needs, so all taps have
    the same positions within `ranges`.
    """
    columns = []
    positions = np.zeros(0, dtype=np.int64)
    where = {
        tap: (g, j) for g, one in enumerate(groups) for j, tap in enumerate(one.taps)
    }
    for tap in taps:
        group, column = where[tap]
        found = staged.get(group)
        if found is None:
            return np.zeros(0, dtype=np.int64), np.zeros((0, len(taps)), dtype=np.int64)
        kept = within(found.positions, ranges)
        positions = found.positions[kept]
        first = found.rows[kept] + column * found.stride
        columns += [first + more for more in range(found.each)]
    return positions, np.stack(columns, axis=1)


def within(positions: Indices, ranges: Spans) -> npt.NDArray[np.bool_]:
    """A mask of the positions that lie within `ranges`."""
    kept = np.zeros(len(positions), dtype=bool)
    for start, stop in ranges:
        kept |= (positions >= start) & (positions < stop)
    return kept


def steps_until_change(ranges: Spans, position: int) -> int:
    """The number of following positions on the same side of every edge of `ranges`."""
    edges = [edge for span in ranges for edge in span if edge > position]
    return min(edges, default=OPEN_END) - position - 1


def runs(positions: Indices) -> list[tuple[int, int]]:
    """Index ranges `[first, last)` of consecutive positions."""
    if not len(positions):
        return []
    breaks = (np.flatnonzero(np.diff(positions) != 1) + 1).tolist()
    edges = [0, *breaks, len(positions)]
    return list(pairwise(edges))

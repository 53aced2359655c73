# SPDX-License-Identifier: Apache-2.0
"""Groups the readouts of a step's requests into jobs, one per operation.

Readouts that one operation can compute form one job, regardless of the number of
requests. While the same requests decode, consecutive steps share a job set: only the
positions move on by one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from vllm.v1.residual.readout_plan import Readout, RowPart
from vllm.v1.residual.row_blocks import Block, LocalGroup
from vllm.v1.residual.spans import OPEN_END, Spans
from vllm.v1.residual.step_layout import Layout, PlacedStep
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


JobKey: TypeAlias = tuple[Any, ...]

ROWS: JobKey = ("rows",)
"""The job that returns rows unchanged."""


@dataclass(frozen=True, slots=True)
class ReadingRequest:
    """A request with readouts, restricted to those with taps in this process."""

    readouts: tuple[Readout, ...]
    groups: tuple[LocalGroup, ...]
    keys: tuple[JobKey, ...]
    """Key of each readout; readouts with equal keys share a job."""
    num_prompt_tokens: int
    reduced: dict[str, int]
    """By readout: the first prompt position that has not been reduced yet.

    A preempted request recomputes earlier ones, which must not count twice.
    """
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """By custom readout: the shape of a token's values, set by its first result."""
    adapter: int = 0
    """The number of its LoRA adapter; 0 without one."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The rows of one readout of one request in a job."""

    req_id: str
    readout: Readout
    start: int
    """Token position of the first row; the positions are consecutive."""
    count: int
    """Number of token positions."""
    first: int
    """Index of the first row in the job; the rows of a token's taps are adjacent."""
    rows: Indices
    """`[count, taps]`: indices relative to the step's first staging row.

    A tap has several columns if its rows take several staging rows.
    """
    reduced: bool = False
    """Whether the result is one value for all rows."""

    @property
    def num_rows(self) -> int:
        """Number of rows in the job, over all staged taps."""
        return self.rows.size // _each(self.readout)


@dataclass(slots=True)
class Job:
    """The rows that one operation reads."""

    key: JobKey
    entries: list[Entry] = field(default_factory=list)
    index: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """`[rows]` int64 on the device: the rows, relative to the step's first staging row.
    """
    kept: dict[Any, Any] = field(default_factory=dict)
    """Values that the operation caches for later steps of the same job set."""
    part: RowPart | None = None
    """What is read of each row; None for a whole row as wide as the stream."""


@dataclass(slots=True)
class JobSet:
    """The jobs of consecutive steps with the same layout."""

    layout: Layout
    shift: int
    """The shift of the step that the job set was made for."""
    until: int
    """The first shift at which the rows of some readout change."""
    jobs: list[Job]
    starts: dict[str, int]
    """Token position of each request's first row in the step."""

    def fits(self, placed: PlacedStep) -> bool:
        """Whether the job set applies to a step."""
        return placed.layout is self.layout and placed.shift < self.until


def _each(readout: Readout) -> int:
    """Columns of `Entry.rows` that a row of a job takes."""
    return 1 if readout.part is None else readout.part.each


def reads(readout: Readout, start: int, count: int) -> bool:
    """Whether a readout has any of `count` positions from `start` on."""
    return any(a < start + count and start < b for a, b in readout.ranges)


def no_rows(count: int, taps: int) -> Indices:
    """`[count, taps]` indices of rows that are not in this process's staging memory."""
    return np.full((count, taps), -1)


def make_job_set(
    placed: PlacedStep,
    requests: Mapping[str, ReadingRequest],
    starts: Callable[[], Mapping[str, int]],
    to_device: Callable[[Indices], torch.Tensor],
) -> JobSet:
    """Build the job set of a step.

    Args:
        placed: the step's layout, with its shift.
        requests: requests with readouts, by id.
        starts: returns the position of each request's first token in the step, by id.
        to_device: copies an index array to the device.

    """
    layout, shift = placed.layout, placed.shift
    jobs: dict[tuple[JobKey, RowPart | None], Job] = {}
    indices: dict[tuple[JobKey, RowPart | None], list[Indices]] = {}
    until = OPEN_END
    staged = staged_groups(layout, shift, requests)
    for req_id, by_group in staged.items():
        request = requests[req_id]
        position = max(int(one.positions[-1]) for one in by_group.values())
        for readout, key in zip(request.readouts, request.keys):
            edges = readout.ranges
            if readout.reduce != "none":
                edges = (*edges, (0, request.num_prompt_tokens))
            until = min(until, 1 + steps_until_change(edges, position))
            found = rows_at(readout.staged, readout.ranges, request.groups, by_group)
            for part, key_of_part in _parts(request, readout, key, *found):
                where = key_of_part, readout.part
                job = jobs.setdefault(where, Job(key_of_part, part=readout.part))
                _add(job, indices.setdefault(where, []), req_id, readout, *part)
    for where, job in jobs.items():
        if job.key[0] != "reduce":  # Those rows are found by their first one.
            job.index = to_device(np.concatenate(indices[where]))
    known = starts()
    first = {req_id: known[req_id] for req_id in staged}
    return JobSet(layout, shift, shift + until, list(jobs.values()), first)


def _parts(
    request: ReadingRequest,
    readout: Readout,
    key: JobKey,
    positions: Indices,  # [n]
    rows: Indices,  # [n, taps]
) -> Iterator[tuple[tuple[Indices, Indices], JobKey]]:
    """Split a readout's positions and rows by job.

    Rows of prompt tokens are reduced in the worker. Rows of generated tokens are few
    and may belong to tokens that are dropped later, so the front end reduces them.
    """
    if readout.reduce == "none":
        parts = [(np.ones(len(positions), dtype=bool), key)]
    else:
        prompt = positions < request.num_prompt_tokens
        fresh = positions >= request.reduced.get(readout.name, 0)
        parts = [(prompt & fresh, key), (~prompt, ROWS)]
    for kept, where in parts:
        if kept.any():
            yield (positions[kept], rows[kept]), where


def _add(
    job: Job,
    indices: list[Indices],
    req_id: str,
    readout: Readout,
    positions: Indices,
    rows: Indices,  # [n, taps], with several columns per tap as in `Entry`
) -> None:
    each = _each(readout)
    first = sum(len(part) for part in indices) // each
    taps = rows.shape[1] // each
    reduced = job.key[0] == "reduce"
    for a, b in runs(positions):
        start, at = int(positions[a]), first + a * taps
        entry = Entry(req_id, readout, start, b - a, at, rows[a:b], reduced)
        job.entries.append(entry)
    indices.append(rows.reshape(-1))

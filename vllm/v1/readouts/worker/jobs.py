# SPDX-License-Identifier: Apache-2.0
"""Groups the readouts of a step's requests into jobs, one per operation.

Readouts that one operation can compute form one job, regardless of the number of
requests. While the same requests decode, consecutive steps share a job set: only the
positions move on by one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from vllm.v1.residual.readout_plan import Readout, RowPart
from vllm.v1.residual.row_blocks import LocalGroup
from vllm.v1.residual.spans import OPEN_END, Spans, overlap
from vllm.v1.residual.step_layout import Layout, PlacedStep
from vllm.v1.residual.tap import Tap

Indices: TypeAlias = npt.NDArray[np.int64]
Arrays: TypeAlias = dict[str, torch.Tensor]
"""Results of a job, by name."""


class StagedSpan(NamedTuple):
    """Consecutive positions of a request whose rows are staged, of a group of taps."""

    start: int
    stop: int
    row: int
    """Index at the group's first tap of the (first) staging row of `start`."""
    stride: int
    """Offset from the rows of one tap to those of the next."""
    each: int
    """Staging rows that a row takes."""


def staged_spans(
    layout: Layout, shift: int, wanted: Mapping[str, object]
) -> dict[str, dict[int, list[StagedSpan]]]:
    """The staged rows of requests with readouts, by request and group, ascending.

    Args:
        layout: the step's layout.
        shift: added to the positions in the layout.
        wanted: requests with readouts, by id.

    """
    found: dict[str, dict[int, list[StagedSpan]]] = {}
    base = 0
    for block in layout.blocks:
        each, stride = block.each, block.num_rows * block.each
        for req_id, row in block.decoding.items():
            if req_id in wanted:
                at = row.origin + shift
                span = StagedSpan(at, at + 1, base + each * row.place, stride, each)
                found.setdefault(req_id, {})[row.group] = [span]
        for (req_id, group, start, count, _), offset in zip(block.picks, block.offsets):
            if req_id in wanted:
                row_at = base + each * offset
                span = StagedSpan(start, start + count, row_at, stride, each)
                found.setdefault(req_id, {}).setdefault(group, []).append(span)
        base += block.num_staged
    return found


class TapPlaces(NamedTuple):
    """Where a request has the rows that a readout reads of a token."""

    groups: tuple[int, ...]
    """The groups of its taps, each once."""
    group_of: Indices
    """`[taps]`: the index of each tap's group in `groups`."""
    columns: Indices
    """`[taps]`: the index of each tap in its group."""


def places_of(taps: Sequence[Tap], groups: Sequence[LocalGroup]) -> TapPlaces:
    """Where a request has rows of these taps."""
    where = {
        tap: (g, j) for g, one in enumerate(groups) for j, tap in enumerate(one.taps)
    }
    found = np.array([where[tap] for tap in taps], np.int64).reshape(-1, 2)
    distinct, group_of = np.unique(found[:, 0], return_inverse=True)
    return TapPlaces(tuple(distinct.tolist()), group_of, found[:, 1])


def rows_at(
    places: TapPlaces, ranges: Spans, staged: Mapping[int, Sequence[StagedSpan]]
) -> Iterator[tuple[int, Indices]]:
    """Consecutive positions within `ranges`, with their rows in the step.

    A tap is staged at every position that any of its readouts needs, so all taps have
    the same positions within `ranges`, each part of them in one span.

    Yields:
        The first position, and the rows `[n, taps]`. A row that takes several staging
        rows has as many columns.

    """
    for span in staged.get(places.groups[0], ()):
        for start, stop in overlap(ranges, span.start, span.stop):
            own = [
                one
                for group in places.groups
                for one in staged.get(group, ())
                if one.start <= start and stop <= one.stop
            ]
            if len(own) < len(places.groups):
                continue
            at = [one.row + one.each * (start - one.start) for one in own]
            counts: Any = span.each
            if len(own) == 1:
                rows = places.columns * span.stride + at[0]
            else:
                strides = np.array([one.stride for one in own])
                rows = np.array(at)[places.group_of]
                rows = rows + places.columns * strides[places.group_of]
                counts = np.array([one.each for one in own])[places.group_of]
            if any([one.each > 1 for one in own]):
                counts = np.zeros_like(rows) + counts
                ends = counts.cumsum()
                rows = np.repeat(rows - ends + counts, counts) + np.arange(ends[-1])
                counts = np.repeat(counts, counts)
            rows = rows[None]
            if stop - start > 1:  # Most often it is one, of many requests.
                rows = rows + np.arange(stop - start)[:, None] * counts
            yield start, rows


def steps_until_change(ranges: Spans, position: int) -> int:
    """The number of following positions on the same side of every edge of `ranges`."""
    edges = [edge for span in ranges for edge in span if edge > position]
    return min(edges, default=OPEN_END) - position - 1


JobKey: TypeAlias = tuple[Any, ...]

ROWS: JobKey = ("rows",)
"""The job that returns rows unchanged."""


@dataclass(frozen=True, slots=True)
class ReadingRequest:
    """A request with readouts, restricted to those with taps in this process."""

    readouts: tuple[Readout, ...]
    places: tuple[TapPlaces, ...]
    """Of each readout."""
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


@dataclass(slots=True)  # Frozen ones take three times as long to make.
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

    @property
    def num_rows(self) -> int:
        """Number of rows, of all entries, which follow one another."""
        last = self.entries[-1] if self.entries else None
        return 0 if last is None else last.first + last.num_rows


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
    until = OPEN_END
    staged = staged_spans(layout, shift, requests)
    for req_id, by_group in staged.items():
        request = requests[req_id]
        position = max([own[-1].stop for own in by_group.values()]) - 1
        for readout, key, places in zip(request.readouts, request.keys, request.places):
            edges = readout.ranges
            if readout.reduce != "none":
                edges = (*edges, (0, request.num_prompt_tokens))
            until = min(until, 1 + steps_until_change(edges, position))
            for found in rows_at(places, readout.ranges, by_group):
                for key_of_part, start, rows in _parts(request, readout, key, *found):
                    where = key_of_part, readout.part
                    if where not in jobs:
                        jobs[where] = Job(key_of_part, part=readout.part)
                    _add(jobs[where], req_id, readout, start, rows)
    for job in jobs.values():
        if job.key[0] != "reduce":  # Those rows are found by their first one.
            every = [entry.rows.reshape(-1) for entry in job.entries]
            job.index = to_device(np.concatenate(every))
    known = starts()
    first = {req_id: known[req_id] for req_id in staged}
    return JobSet(layout, shift, shift + until, list(jobs.values()), first)


def _parts(
    request: ReadingRequest,
    readout: Readout,
    key: JobKey,
    start: int,
    rows: Indices,  # [n, taps]
) -> Iterator[tuple[JobKey, int, Indices]]:
    """Split consecutive positions of a readout by job: key, start and rows.

    Rows of prompt tokens are reduced in the worker. Rows of generated tokens are few
    and may belong to tokens that are dropped later, so the front end reduces them.
    """
    if readout.reduce == "none":
        yield key, start, rows
        return
    stop = start + len(rows)
    edge = min(max(request.num_prompt_tokens, start), stop)
    fresh = max(request.reduced.get(readout.name, 0), start)
    if fresh < edge:
        yield key, fresh, rows[fresh - start : edge - start]
    if edge < stop:
        yield ROWS, edge, rows[edge - start :]


def _add(job: Job, req_id: str, readout: Readout, start: int, rows: Indices) -> None:
    """Add consecutive positions; `rows` as in `Entry`."""
    reduced = job.key[0] == "reduce"
    entry = Entry(req_id, readout, start, len(rows), job.num_rows, rows, reduced)
    job.entries.append(entry)

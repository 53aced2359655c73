# SPDX-License-Identifier: Apache-2.0
"""What a step reads out: its requests' readouts, gathered into a few jobs.

Readouts that one operation can answer make one job, however many requests they are of.
While the same requests decode, a step's program is the last one's, a position further.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch

from vllm.v1.capture.plan import OPEN_END
from vllm.v1.capture.staging.blocks import LocalGroup
from vllm.v1.capture.staging.step_layout import Layout, PlacedStep
from vllm.v1.readouts.plan import Readout
from vllm.v1.readouts.worker.layout import (
    Indices,
    rows_at,
    runs,
    staged_groups,
    steps_until_change,
)

JobKey: TypeAlias = tuple[Any, ...]

ROWS: JobKey = ("rows",)
"""Rows as they are."""


@dataclass(frozen=True, slots=True)
class ReadingRequest:
    """A request that reads out, as far as its taps are in this process."""

    readouts: tuple[Readout, ...]
    groups: tuple[LocalGroup, ...]
    keys: tuple[JobKey, ...]
    """Of each readout: those with equal ones are one job."""
    num_prompt_tokens: int
    reduced: dict[str, int]
    """By readout: prompt tokens below are reduced already. A request that was
    preempted computes them again."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The rows of one readout of one request in a job."""

    req_id: str
    readout: Readout
    start: int
    """Token position of the first row; the others follow it."""
    count: int
    """Token positions."""
    first: int
    """Index of the first row in the job; a token's taps follow each other."""
    rows: Indices
    """Where they are, counted from the step's first staging row, `[count, taps]`."""
    reduced: bool = False
    """Whether one value for all of them is the result."""

    @property
    def num_rows(self) -> int:
        """Rows in the job, over all staged taps."""
        return self.count * len(self.readout.staged)


@dataclass(slots=True)
class Job:
    """Rows that one operation answers from."""

    key: JobKey
    entries: list[Entry] = field(default_factory=list)
    index: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """`[rows]` int64 on the device: where each row is, counted from the step's first
    staging row."""
    kept: dict[str, Any] = field(default_factory=dict)
    """What an operation keeps for the next step of the same program."""


@dataclass(slots=True)
class Program:
    """The jobs of steps that are alike."""

    layout: Layout
    shift: int
    """Of the step that it was made for."""
    until: int
    """The first shift at which some readout has other rows."""
    jobs: list[Job]
    starts: dict[str, int]
    """Token position of each request's first row in the step."""

    def fits(self, placed: PlacedStep) -> bool:
        """Whether it is the program of a step as well."""
        return placed.layout is self.layout and placed.shift < self.until


def make_program(
    placed: PlacedStep,
    requests: Mapping[str, ReadingRequest],
    starts: Callable[[], Mapping[str, int]],
    to_device: Callable[[Indices], torch.Tensor],
) -> Program:
    """The program of a step.

    Args:
        placed: where the step's rows are.
        requests: that read out, by id.
        starts: gives the token position of each request's first token in the step.
        to_device: copies indices.

    """
    layout, shift = placed.layout, placed.shift
    jobs: dict[JobKey, Job] = {}
    indices: dict[JobKey, list[Indices]] = {}
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
            for part, where in _parts(request, readout, key, *found):
                job = jobs.setdefault(where, Job(where))
                _add(job, indices.setdefault(where, []), req_id, readout, *part)
    for key, job in jobs.items():
        job.index = to_device(np.concatenate(indices[key]))
    known = starts()
    return Program(
        layout,
        shift,
        shift + until,
        list(jobs.values()),
        {req_id: known[req_id] for req_id in staged},
    )


def _parts(
    request: ReadingRequest,
    readout: Readout,
    key: JobKey,
    positions: Indices,  # [n]
    rows: Indices,  # [n, taps]
) -> Iterator[tuple[tuple[Indices, Indices], JobKey]]:
    """Rows of a readout by the job that they go to.

    Prompt tokens are reduced here; generated tokens are few in a step and may turn out
    not to count, so that the front end reduces them.
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
    rows: Indices,  # [n, taps]
) -> None:
    first = sum(len(part) for part in indices)
    taps = rows.shape[1]
    reduced = job.key[0] == "reduce"
    for a, b in runs(positions):
        start, at = int(positions[a]), first + a * taps
        entry = Entry(req_id, readout, start, b - a, at, rows[a:b], reduced)
        job.entries.append(entry)
    indices.append(rows.reshape(-1))

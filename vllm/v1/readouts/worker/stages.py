# SPDX-License-Identifier: Apache-2.0
"""Results and rows of earlier pipeline stages, on their way to the last one.

They travel with the hidden states of their step, as further intermediate tensors, so
that the last stage has them when it returns the step's output.

A stage computes what it has the rows for, and only results leave it. A lens is computed
in the last stage, which has the head, and so is what reads rows of several stages at
once: the rows are sent there.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import numpy as np
import torch

from vllm.v1.readouts.worker.jobs import (
    Entry,
    Indices,
    Job,
    JobKey,
    no_rows,
)
from vllm.v1.readouts.worker.pending import JobResult
from vllm.v1.residual.plain_tensors import forms_of, joined, packed, parted, unpacked
from vllm.v1.residual.readout_plan import Readout
from vllm.v1.residual.sizes import stage_starts
from vllm.v1.residual.tap import Tap

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True, slots=True)
class Share:
    """What a process does for one readout."""

    here: tuple[Readout, ...] = ()
    """Parts that it computes from its own rows."""
    sent: Readout | None = None
    """The rows that it contributes to a part that the last stage computes."""
    joined: Readout | None = None
    """In the last stage: the part that it computes from rows that were sent."""


@dataclass(frozen=True, slots=True)
class Stages:
    """The pipeline stages of a model, as one of them sees them."""

    starts: tuple[int, ...] = (0,)
    """The first layer of each stage."""
    own: int = 0
    """The stage of this process."""

    @classmethod
    def of(cls, vllm_config: "VllmConfig", own: int) -> "Stages":
        """The stages of an engine's configuration; `own` is that of this process."""
        return cls(tuple(stage_starts(vllm_config)), own)

    @property
    def is_last(self) -> bool:
        """Whether this process is in the last stage."""
        return self.own == len(self.starts) - 1

    def share(self, readout: Readout, local: Set[Tap]) -> Share:
        """What this process does for a readout.

        Args:
            readout: as in the request's plan.
            local: the taps that are staged in this process.

        """
        here, sent, joined = [], None, None
        for stage, part in self.parts(readout):
            if self._stages(part) == {stage}:
                if stage == self.own:
                    here.append(part)
                continue
            if own := tuple(tap for tap in part.staged if tap in local):
                sent = Readout(part.name, "rows", own, part.ranges)
            if self.is_last:
                joined = part
        return Share(tuple(here), sent, joined)

    def parts(self, readout: Readout) -> list[tuple[int, Readout]]:
        """The parts of a readout, each with the stage that computes it.

        At most one of them needs rows of other stages.
        """
        last = len(self.starts) - 1
        stages = self._stages(readout)
        if readout.kind == "lens":
            return [(last, readout)]
        if len(stages) == 1:
            return [(stages.pop(), readout)]
        if readout.kind not in ("rows", "norm", "attention"):
            return [(last, readout)]
        taps: dict[int | None, list[Tap]] = {}
        for tap in readout.taps:  # None: a norm's cosine to a row of the stage before.
            needs = self._stages(msgspec.structs.replace(readout, taps=(tap,)))
            taps.setdefault(needs.pop() if len(needs) == 1 else None, []).append(tap)
        return [
            (
                last if stage is None else stage,
                msgspec.structs.replace(readout, taps=tuple(own)),
            )
            for stage, own in taps.items()
        ]

    def _stages(self, readout: Readout) -> set[int]:
        """The stages that have the rows that a readout reads."""
        return {bisect_right(self.starts, layer) - 1 for layer, _ in readout.staged}


HEADER, ROWS, VALUES = "readout_header", "readout_rows", "readout_values"
"""Names of the tensors: what the others contain (on the host), rows, and results."""

UNSLICED = dict.fromkeys((HEADER, ROWS, VALUES), False)
"""For upstream's `all_gather_tensors`: these tensors are sent as they are.

Of the others each tensor-parallel rank sends a slice, as all ranks have the same. Of
these only rank 0 has all.
"""

SEND: JobKey = ("send",)
"""The job whose rows are sent to the last stage, or are the last stage's own."""

Place: TypeAlias = tuple[str, str, int, int, tuple[Tap, ...]]
"""`(request, readout, position, tokens, taps)` of consecutive rows `[tokens, taps]`."""

Places: TypeAlias = tuple[int, list[Place]]
"""Places of a stage, with a shift that is added to their positions.

The places are equal in consecutive steps of one batch.
"""

Joined: TypeAlias = Mapping[str, tuple[Readout, JobKey]]
"""Readouts of a request that read sent rows, with the keys of their jobs, by name."""


def _sent(entry: Entry, shift: int) -> tuple[Any, ...]:
    """An entry without the content of its readout."""
    one, start = entry.readout, entry.start + shift
    own = one.name, one.kind, one.taps, one.alone
    return entry.req_id, *own, start, entry.count, entry.first, entry.reduced


def _restored(sent: tuple[Any, ...]) -> Entry:
    req_id, name, kind, taps, alone, start, count, first, reduced = sent
    readout = Readout(name, kind, taps, (), alone=alone)
    rows = no_rows(count, len(taps))
    return Entry(req_id, readout, start, count, first, rows, reduced)


@dataclass(slots=True)
class StageMessage:
    """What the last stage gets of a step's earlier stages."""

    places: list[Places] = field(default_factory=list)
    rows: list[torch.Tensor] = field(default_factory=list)
    """`[rows, hidden_size]` each, in the order of `places`; empty except on rank 0."""
    results: list[JobResult] = field(default_factory=list)
    """With arrays on the device."""

    def __bool__(self) -> bool:
        return bool(self.places or self.results)

    def add_rows(self, job: Job, rows: torch.Tensor | None, further: int) -> None:
        """Add the rows of a job; `further` is added to its entries' positions."""
        own = [
            (one.req_id, one.readout.name, one.start, one.count, one.readout.taps)
            for one in job.entries
        ]
        self.places.append((further, own))
        if rows is not None:
            self.rows.append(rows)

    def put(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """The intermediate tensors of a step, with these if there are any."""
        if not self:
            return tensors
        results = [
            ([_sent(e, one.shift) for e in one.entries], list(one.arrays), one.errors)
            for one in self.results
        ]
        arrays = [array for one in self.results for array in one.arrays.values()]
        out = {**tensors, HEADER: packed((self.places, results, forms_of(arrays)))}
        if self.rows:
            out[ROWS] = torch.cat(self.rows)
        if arrays:
            out[VALUES] = joined(arrays)
        return out


@dataclass(frozen=True, slots=True)
class ReceivedStageMessage:
    """What `StageMessage.put` has added; values may still arrive."""

    header: torch.Tensor  # uint8
    rows: torch.Tensor | None
    values: torch.Tensor | None  # uint8

    @classmethod
    def taken(cls, tensors: dict[str, Any]) -> "ReceivedStageMessage | None":
        """Remove the tensors from received ones; None if there are none."""
        if HEADER not in tensors:
            return None
        return cls(
            tensors.pop(HEADER), tensors.pop(ROWS, None), tensors.pop(VALUES, None)
        )

    def opened(self) -> StageMessage:
        """The content, once it has arrived."""
        places, sent, forms = unpacked(self.header.cpu())
        rows = [] if self.rows is None else [self.rows]
        arrays = iter(()) if self.values is None else parted(self.values, forms)
        results = [
            JobResult(
                [_restored(one) for one in entries],
                0,
                {name: next(arrays) for name in names},
                errors,
            )
            for entries, names, errors in sent
        ]
        return StageMessage(places, rows, results)


@dataclass(slots=True)
class JoinedSet:
    """The jobs of sent rows, in consecutive steps of a batch."""

    places: list[list[Place]]
    shifts: list[int]
    """Of the places, less what is added to the positions of the jobs' entries."""
    jobs: list[tuple[Job, torch.Tensor]]
    """Each with the indices `[rows]` of its rows among those sent."""
    num_rows: int
    """How many rows are sent."""

    def rows(self, sent: Sequence[torch.Tensor], index: torch.Tensor) -> torch.Tensor:
        """The rows of a job.

        Args:
            sent: all rows, in the order of the places.
            index: of the job's rows among them.

        Raises:
            RuntimeError: rows are missing, because a stage has failed.

        """
        if sum(len(one) for one in sent) != self.num_rows:
            raise RuntimeError("a pipeline stage failed to send rows; its log says why")
        rows = sent[0] if len(sent) == 1 else torch.cat(list(sent))
        return rows.index_select(0, index)

    def fits(self, places: Sequence[Places], further: int) -> bool:
        """Whether the set applies to a step."""
        return self.shifts == [shift - further for shift, _ in places] and (
            self.places == [own for _, own in places]
        )


def make_joined_set(
    places: Sequence[Places],
    joined: Mapping[str, Joined],
    further: int,
    to_device: Callable[[Indices], torch.Tensor],
) -> JoinedSet:
    """Build the joined set of a step.

    Args:
        places: of all sent rows.
        joined: the readouts, by request.
        further: is added to the positions of all jobs' entries.
        to_device: copies an index array to the device.

    """
    found = joined_jobs(places, joined, further)
    jobs = [(job, to_device(index)) for job, index in found]
    shifts = [shift - further for shift, _ in places]
    own_places = [own for _, own in places]
    count = sum(one[3] * len(one[4]) for own in own_places for one in own)
    return JoinedSet(own_places, shifts, jobs, count)


def joined_jobs(
    places: Sequence[Places], joined: Mapping[str, Joined], further: int
) -> list[tuple[Job, Indices]]:
    """The jobs of readouts that read sent rows.

    Args:
        places: of all sent rows.
        joined: the readouts, by request.
        further: is added to the positions of the jobs' entries later.

    Returns:
        Each job with the indices `[rows]` of its rows among those sent. A readout of
        which a row is missing is left out.

    """
    columns: dict[tuple[str, str, int, int], dict[Tap, Indices]] = {}
    first = 0
    for shift, own in places:
        for req_id, name, start, count, taps in own:
            rows = first + np.arange(count * len(taps)).reshape(count, len(taps))
            tokens = req_id, name, start + shift, count
            columns.setdefault(tokens, {}).update(zip(taps, rows.T))
            first += rows.size
    jobs: dict[JobKey, Job] = {}
    indices: dict[JobKey, list[Indices]] = {}
    for (req_id, name, start, count), by_tap in columns.items():
        readout, key = joined.get(req_id, {}).get(name, (None, None))
        if readout is None or key is None or not by_tap.keys() >= {*readout.staged}:
            continue
        job, found = jobs.setdefault(key, Job(key)), indices.setdefault(key, [])
        at = sum(len(one) for one in found)
        rows = np.stack([by_tap[tap] for tap in readout.staged], axis=1)
        job.entries.append(
            Entry(req_id, readout, start - further, count, at, no_rows(*rows.shape))
        )
        found.append(rows.reshape(-1))
    return [(job, np.concatenate(indices[key])) for key, job in jobs.items()]

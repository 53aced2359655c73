# SPDX-License-Identifier: Apache-2.0
"""Results and rows of earlier pipeline stages, on their way to the last one.

They travel with the hidden states of their step, as further intermediate tensors, so
that the last stage has them when it returns the step's output.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
import torch

from vllm.v1.readouts.worker.jobs import (
    Entry,
    Job,
    JobKey,
    JobSet,
    no_rows,
)
from vllm.v1.readouts.worker.layout import Indices
from vllm.v1.readouts.worker.pending import JobResult
from vllm.v1.residual.readout_plan import Kind, Readout
from vllm.v1.residual.tap import Tap

HEADER, ROWS, VALUES = "readout_header", "readout_rows", "readout_values"
"""Names of the tensors: what the others contain (on the host), rows, and results."""

UNSLICED = dict.fromkeys((HEADER, ROWS, VALUES), False)
"""For upstream's `all_gather_tensors`: these tensors are sent as they are.

Of the others each tensor-parallel rank sends a slice, as all ranks have the same. Of
these only rank 0 has all.
"""

SEND: JobKey = ("send",)
"""The job whose rows are sent to the last stage, or are the last stage's own."""

ALIGNMENT = 16
"""Bytes at whose multiples arrays start in the tensor of results."""

Place: TypeAlias = tuple[str, str, int, int, tuple[Tap, ...]]
"""`(request, readout, position, tokens, taps)` of consecutive rows `[tokens, taps]`."""

Places: TypeAlias = tuple[int, list[Place]]
"""Places of a stage, with a shift that is added to their positions.

The places are equal in consecutive steps of one batch.
"""

Joined: TypeAlias = Mapping[str, tuple[Readout, JobKey]]
"""Readouts of a request that read sent rows, with the keys of their jobs, by name."""


class _Entry(msgspec.Struct, array_like=True):
    """An `Entry` without the content of its readout."""

    req_id: str
    name: str
    kind: Kind
    taps: tuple[Tap, ...]
    start: int
    count: int
    first: int
    reduced: bool

    def restored(self) -> Entry:
        readout = Readout(self.name, self.kind, self.taps, ())
        rows = no_rows(self.count, len(self.taps))
        return Entry(
            self.req_id, readout, self.start, self.count, self.first, rows, self.reduced
        )


class _Array(msgspec.Struct, array_like=True):
    """An array in the tensor of results."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    first: int
    """Its first byte."""
    size: int
    """In bytes."""

    def taken(self, values: torch.Tensor) -> torch.Tensor:
        own = values[self.first : self.first + self.size]
        return own.view(getattr(torch, self.dtype)).view(self.shape)


class _Result(msgspec.Struct, array_like=True):
    """A `JobResult`."""

    entries: list[_Entry]
    arrays: list[_Array]
    errors: dict[int, str]


class _Header(msgspec.Struct, array_like=True):
    places: list[Places]
    results: list[_Result]


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
        results, values = _packed(self.results)
        packed = msgspec.msgpack.encode(_Header(self.places, results))
        # Not as an object: upstream sends only tensors between processes on CPUs.
        out = {
            **tensors,
            HEADER: torch.frombuffer(bytearray(packed), dtype=torch.uint8),
        }
        if self.rows:
            out[ROWS] = torch.cat(self.rows)
        if values:
            out[VALUES] = torch.cat(values)
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
        packed = self.header.cpu().numpy().tobytes()
        header = msgspec.msgpack.decode(packed, type=_Header)
        rows = [] if self.rows is None else [self.rows]
        values = torch.empty(0) if self.values is None else self.values
        results = [
            JobResult(
                [entry.restored() for entry in one.entries],
                0,
                {array.name: array.taken(values) for array in one.arrays},
                one.errors,
            )
            for one in header.results
        ]
        return StageMessage(header.places, rows, results)


def _packed(results: Sequence[JobResult]) -> tuple[list[_Result], list[torch.Tensor]]:
    """Results as they are sent, and the bytes of their arrays, to be concatenated."""
    packed: list[_Result] = []
    values: list[torch.Tensor] = []
    first = 0
    for result in results:
        arrays = []
        for name, array in result.arrays.items():
            flat = array.contiguous().flatten().view(torch.uint8)
            dtype = str(array.dtype).removeprefix("torch.")
            arrays.append(_Array(name, dtype, tuple(array.shape), first, len(flat)))
            padding = flat.new_zeros(-len(flat) % ALIGNMENT)
            values += [flat, padding]
            first += len(flat) + len(padding)
        entries = [_sent(entry, result.shift) for entry in result.entries]
        packed.append(_Result(entries, arrays, result.errors))
    return packed, values


def _sent(entry: Entry, shift: int) -> _Entry:
    one = entry.readout
    start = entry.start + shift
    return _Entry(
        entry.req_id,
        one.name,
        one.kind,
        one.taps,
        start,
        entry.count,
        entry.first,
        entry.reduced,
    )


class JoinedJob(NamedTuple):
    """A job of readouts that read sent rows."""

    job: Job
    where: torch.Tensor
    """`[rows]`: indices of the rows among those sent."""
    own: Job | None
    """A lens of rows that were not sent, which follows: one product serves both."""


@dataclass(slots=True)
class JoinedSet:
    """The jobs of sent rows, in consecutive steps of a batch."""

    places: list[list[Place]]
    shifts: list[int]
    """Of the places, less what is added to the positions of the jobs' entries."""
    job_set: JobSet | None
    """The last stage's own jobs."""
    jobs: list[JoinedJob]
    num_rows: int
    """How many rows are sent."""

    def rows(
        self,
        sent: Sequence[torch.Tensor],
        index: torch.Tensor,
        followed: Sequence[torch.Tensor | Any],
    ) -> torch.Tensor:
        """The rows of a job.

        Args:
            sent: all rows, in the order of the places.
            index: of the job's rows among them.
            followed: the rows that the last stage has itself, if there are any.

        Raises:
            RuntimeError: rows are missing, because a stage has failed.

        """
        missing = sum(len(one) for one in sent) != self.num_rows
        if missing or any(isinstance(one, str) for one in followed):
            raise RuntimeError("a pipeline stage failed to send rows; its log says why")
        rows = (sent[0] if len(sent) == 1 else torch.cat(list(sent))).index_select(
            0, index
        )
        return torch.cat((rows, *followed)) if followed else rows

    def fits(
        self, places: Sequence[Places], job_set: JobSet | None, further: int
    ) -> bool:
        """Whether the set applies to a step."""
        return (
            self.job_set is job_set
            and self.shifts == [shift - further for shift, _ in places]
            and self.places == [own for _, own in places]
        )


def make_joined_set(
    places: Sequence[Places],
    joined: Mapping[str, Joined],
    job_set: JobSet | None,
    further: int,
    to_device: Callable[[Indices], torch.Tensor],
) -> JoinedSet:
    """Build the joined set of a step.

    Args:
        places: of all sent rows.
        joined: the readouts, by request.
        job_set: the last stage's own jobs.
        further: is added to the positions of all jobs' entries.
        to_device: copies an index array to the device.

    """
    rest = [
        job
        for job in (() if job_set is None else job_set.jobs)
        if job.key[0] not in (*SEND, "step")
    ]
    jobs = []
    for job, index in joined_jobs(places, joined, further):
        own = next((one for one in rest if _is_followed(job, one)), None)
        if own is not None:
            moved = [replace(e, first=e.first + len(index)) for e in own.entries]
            job = Job(job.key, [*job.entries, *moved])
            rest = [one for one in rest if one is not own]
        jobs.append(JoinedJob(job, to_device(index), own))
    shifts = [shift - further for shift, _ in places]
    own_places = [own for _, own in places]
    count = sum(one[3] * len(one[4]) for own in own_places for one in own)
    return JoinedSet(own_places, shifts, job_set, jobs, count)


def _is_followed(job: Job, own: Job) -> bool:
    return job.key[0] == "lens" and own.key == job.key


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

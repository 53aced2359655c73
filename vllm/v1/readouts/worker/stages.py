# SPDX-License-Identifier: Apache-2.0
"""Rows of earlier pipeline stages, which a lens at the last stage reads.

They travel with the hidden states of their step, as two more entries of the
intermediate tensors. Only the last stage has the model's final norm and head.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec
import torch

from vllm.v1.readouts.plan import Readout, Tap
from vllm.v1.readouts.worker.program import Entry, Job, JobKey, no_rows

ROWS, PLACES = "readout_rows", "readout_places"
"""Names of the two entries."""

SEND: JobKey = ("send",)
"""The job of an earlier stage, whose rows are sent on."""

Place: TypeAlias = tuple[str, str, int, int, tuple[Tap, ...]]
"""`(request, readout, position, tokens, taps)` of consecutive rows `[tokens, taps]`."""

Lenses: TypeAlias = Mapping[str, tuple[Readout, JobKey]]
"""The lenses of a request with the keys of their jobs, by name."""


@dataclass(slots=True)
class StageRows:
    """Rows on their way to the last stage."""

    places: list[Place] = field(default_factory=list)
    rows: list[torch.Tensor] = field(default_factory=list)
    """`[rows, hidden_size]` each, in the order of `places`."""

    def add(self, job: Job, rows: torch.Tensor, further: int) -> None:
        """Add the rows of a job; `further` is added to its entries' positions."""
        for entry in job.entries:
            one = entry.readout
            start = entry.start + further
            self.places.append((entry.req_id, one.name, start, entry.count, one.taps))
        self.rows.append(rows)

    def put(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """The intermediate tensors of a step with these rows, if there are any."""
        if not self.places:
            return tensors
        packed = msgspec.msgpack.encode(self.places)
        places = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        return {**tensors, PLACES: places, ROWS: torch.cat(self.rows)}


@dataclass(frozen=True, slots=True)
class Arriving:
    """What `StageRows.put` has added; values may still arrive."""

    places: torch.Tensor  # uint8: `StageRows.places` by MessagePack
    rows: torch.Tensor

    @classmethod
    def taken(cls, tensors: dict[str, Any]) -> "Arriving | None":
        """Remove the rows from received tensors; None if there are none."""
        if ROWS not in tensors:
            return None
        return cls(tensors.pop(PLACES), tensors.pop(ROWS))

    def opened(self) -> StageRows:
        """The rows, once they have arrived."""
        packed = self.places.cpu().numpy().tobytes()
        return StageRows(msgspec.msgpack.decode(packed, type=list[Place]), [self.rows])


def with_received(
    jobs: Sequence[Job],
    gathered: Sequence[Any],
    received: StageRows,
    lenses: Mapping[str, Lenses],
    further: int,
) -> tuple[list[Job], list[Any]]:
    """Add received rows to the jobs of the last stage's own rows.

    Args:
        jobs: the jobs of the step.
        gathered: their rows.
        received: rows of earlier stages.
        lenses: of the requests that are read out, by request.
        further: is added to the positions of all jobs' entries later.

    Returns:
        Jobs and rows. Received rows come first, as their layers do.

    """
    spans: dict[JobKey, list[torch.Tensor]] = {}
    made: dict[JobKey, Job] = {}
    rows = received.rows[0] if received.rows else torch.empty(0)
    first = 0
    for req_id, name, start, count, taps in received.places:
        span = rows[first : first + count * len(taps)]
        first += len(span)
        known = lenses.get(req_id, {}).get(name)
        if known is None:
            continue
        readout, key = known
        job = made.setdefault(key, Job(key))
        at = sum(len(one) for one in spans.setdefault(key, []))
        own = Readout(name, "lens", taps, readout.ranges)
        job.entries.append(
            Entry(req_id, own, start - further, count, at, no_rows(count, len(taps)))
        )
        spans[key].append(span)
    out = [(job, torch.cat(spans[key])) for key, job in made.items()]
    for job, found in zip(jobs, gathered):
        if job.key in made:
            number = [one.key for one, _ in out].index(job.key)
            out[number] = _followed(out[number], job, found)
        else:
            out.append((job, found))
    return [job for job, _ in out], [found for _, found in out]


def _followed(
    before: tuple[Job, torch.Tensor], job: Job, rows: torch.Tensor
) -> tuple[Job, torch.Tensor]:
    ahead, sent = before
    entries = [
        Entry(
            one.req_id,
            one.readout,
            one.start,
            one.count,
            one.first + len(sent),
            one.rows,
            one.reduced,
        )
        for one in job.entries
    ]
    return Job(job.key, [*ahead.entries, *entries]), torch.cat((sent, rows))

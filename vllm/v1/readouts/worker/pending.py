# SPDX-License-Identifier: Apache-2.0
"""A step's results while they are being copied from the device."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch

from vllm.v1.readouts.worker.jobs import Entry
from vllm.v1.residual.readout_plan import (
    MAX_PACKED,
    Kind,
    ReadoutPart,
    RequestReadouts,
    StepReadouts,
)
from vllm.v1.residual.tap import Tap

LENS_FAILED = (
    "the logits are not numbers: the stream overflowed, or another tensor-parallel "
    "rank failed, whose log then says why"
)
"""Error of a lens."""

ONE_TAP: tuple[Kind, ...] = ("probe", "sae")
"""Kinds that read a single tap, so that their results have no axis for taps."""
BY_ROW: tuple[Kind, ...] = (*ONE_TAP, "lens", "norm", "rows")
"""Kinds whose arrays have a value for each row of a job."""


@dataclass(slots=True)
class JobResult:
    """The results of one job."""

    entries: Sequence[Entry]
    shift: int
    """Added to the positions of the entries, which may be those of an earlier step."""
    arrays: dict[str, torch.Tensor]
    """On the host; valid once the copy is complete."""
    errors: dict[int, str] = field(default_factory=dict)
    """Error messages by index of the entry."""


@dataclass(slots=True)
class PendingReadouts:
    """The results of a step, possibly still being copied to the host."""

    results: list[JobResult]
    starts: Mapping[str, int]
    """Token position of each request's first row in the step, less `shift`."""
    shift: int = 0
    done: "torch.cuda.Event | None" = None
    kept: list[Any] = field(default_factory=list)
    """References to tensors that the device may still be reading."""
    split: Mapping[str, Mapping[str, tuple[Tap, ...]]] = field(default_factory=dict)
    """By request and name: the taps of readouts of which stages compute parts."""

    def collect(self) -> StepReadouts:
        """Wait for the copies and return the results by request id."""
        if self.done is not None:
            self.done.synchronize()
        self.kept.clear()
        for result in self.results:
            if result.entries and result.entries[0].readout.kind == "lens":
                _find_failures(result)
        return self._by_request()

    def failed(self, text: str) -> StepReadouts:
        """The results, if they are an error."""
        for result in self.results:
            result.errors = dict.fromkeys(range(len(result.entries)), text)
            result.arrays = {}
        self.split = {}
        return self._by_request()

    def _by_request(self) -> StepReadouts:
        found: StepReadouts = {}
        pieces: dict[_Tokens, list[_Piece]] = {}
        for result in self.results:
            for entry, part in zip(result.entries, _parts(result)):
                of_request = found.get(entry.req_id)
                if of_request is None:
                    start = self.starts[entry.req_id] + self.shift
                    of_request = found[entry.req_id] = RequestReadouts(start, [])
                if not self.split or part.name not in self.split.get(entry.req_id, ()):
                    of_request.parts.append(part)
                    continue
                part.unpack()
                tokens = entry.req_id, part.name, part.start, part.count, part.reduced
                pieces.setdefault(tokens, []).append((entry.readout.taps, part))
        for (req_id, name, *_), own in pieces.items():
            found[req_id].parts += _merged(self.split[req_id][name], own)
        return found


_Tokens: TypeAlias = tuple[str, str, int, int, bool]
"""Request, readout, first position, count of tokens, and whether they are reduced."""
_Piece: TypeAlias = tuple[tuple[Tap, ...], ReadoutPart]
"""A part of a readout with some of its taps."""


def _merged(taps: Sequence[Tap], pieces: Sequence[_Piece]) -> list[ReadoutPart]:
    """The part with all taps, in their order; none if some are missing.

    An error of a stage is that of the whole part.
    """
    if failed := [one for _, one in pieces if one.error]:
        return failed[:1]
    having = [tap for own, _ in pieces for tap in own]
    if len(having) < len(taps):
        return []
    first, axis = pieces[0][1], 0 if pieces[0][1].reduced else 1
    order = [having.index(tap) for tap in taps]
    arrays = {
        label: np.concatenate([one.arrays[label] for _, one in pieces], axis)
        for label in first.arrays
    }
    arrays = {label: array.take(order, axis) for label, array in arrays.items()}
    return [
        ReadoutPart(first.name, first.start, first.count, arrays, reduced=first.reduced)
    ]


def _find_failures(result: JobResult) -> None:
    """Let NaN be an error of a lens: no number is the log-probability of its token."""
    failed = np.zeros(0, dtype=bool)
    for array in result.arrays.values():
        if array.is_floating_point() and array.isnan().any():
            failed = array.isnan().flatten(1).any(1).numpy()
    if not failed.any():
        return
    for number, entry in enumerate(result.entries):
        if failed[entry.first : entry.first + entry.num_rows].any():
            result.errors[number] = LENS_FAILED


def _parts(result: JobResult) -> Iterator[ReadoutPart]:
    """The part of each entry."""
    arrays = {name: one.numpy() for name, one in result.arrays.items()}
    by_row = _values_by_row(result, arrays)
    for number, entry in enumerate(result.entries):
        if not by_row or entry.count != 1 or number in result.errors:
            yield _part(result, number, entry, arrays)
            continue
        # A single token, as of most requests in most steps.
        readout, start = entry.readout, entry.start + result.shift
        taps = len(readout.taps)
        axes = (1,) if readout.kind in ONE_TAP else (1, taps)
        first, stop = entry.first, entry.first + taps  # The taps that it reads.
        packed = {
            label: (dtype, axes + shape, data[first * size : stop * size])
            for label, dtype, shape, size, data in by_row
        }
        yield ReadoutPart(readout.name, start, 1, {}, packed=packed)


def _values_by_row(
    result: JobResult, arrays: dict[str, np.ndarray[Any, Any]]
) -> list[tuple[str, str, tuple[int, ...], int, bytes]]:
    """Of each array: label, dtype, shape and bytes of a row's value, and all data.

    Empty if arrays have no value for each row, or are too large to be packed.
    """
    if not result.entries or result.entries[0].reduced:
        return []
    size = sum([one.nbytes for one in arrays.values()])
    kind = result.entries[0].readout.kind
    if kind not in BY_ROW or size > MAX_PACKED * len(result.entries):
        return []
    return [
        (label, one.dtype.str, one.shape[1:], one.nbytes // len(one), one.tobytes())
        for label, one in arrays.items()
    ]


def _part(
    result: JobResult,
    number: int,
    entry: Entry,
    arrays: dict[str, np.ndarray[Any, Any]],
) -> ReadoutPart:
    start = entry.start + result.shift
    name, error = entry.readout.name, result.errors.get(number, "")
    if error:
        return ReadoutPart(name, start, entry.count, {}, error=error)
    if entry.reduced:
        own = {label: one[number] for label, one in arrays.items()}
        return ReadoutPart(name, start, entry.count, own, reduced=True)
    if entry.readout.kind == "attention" and "all.weights" in arrays:
        found = {label.removeprefix("all."): one for label, one in arrays.items()}
        own = {label: one[number : number + 1] for label, one in found.items()}
        return ReadoutPart(name, start, entry.count, own)
    if entry.readout.kind in ("attention", "attribution"):
        mine = f"{number}."
        own = {k.removeprefix(mine): v for k, v in arrays.items() if k.startswith(mine)}
        return ReadoutPart(name, start, entry.count, own)
    if entry.readout.kind == "custom":
        own = {"values": arrays[str(number)]}
        return ReadoutPart(name, start, entry.count, own)
    if entry.readout.kind in ONE_TAP:
        rows = slice(entry.first, entry.first + entry.count)
        own = {label: one[rows] for label, one in arrays.items()}
        return ReadoutPart(name, start, entry.count, own)
    staged, taps = len(entry.readout.staged), len(entry.readout.taps)
    rows = slice(entry.first, entry.first + entry.count * staged)
    own = {
        label: one[rows].reshape(entry.count, staged, *one.shape[1:])[:, :taps]
        for label, one in arrays.items()
    }
    return ReadoutPart(name, start, entry.count, own)

# SPDX-License-Identifier: Apache-2.0
"""A step's results while they are being copied from the device."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.readouts.plan import ReadoutPart, RequestReadouts
from vllm.v1.readouts.worker.program import Entry
from vllm.v1.steering.receipts import Fired, StepReceipt


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
    starts: dict[str, int]
    """Token position of each request's first row in the step."""
    done: "torch.cuda.Event | None" = None
    kept: list[Any] = field(default_factory=list)
    """References to tensors that the device may still be reading."""

    def collect(self) -> dict[str, RequestReadouts]:
        """Wait for the copies and return the results by request id."""
        if self.done is not None:
            self.done.synchronize()
        self.kept.clear()
        found: dict[str, RequestReadouts] = {}
        for result in self.results:
            arrays = {name: one.numpy() for name, one in result.arrays.items()}
            for number, entry in enumerate(result.entries):
                part = _part(result, number, entry, arrays)
                start = self.starts[entry.req_id]
                of_request = found.setdefault(entry.req_id, RequestReadouts(start, []))
                _put(of_request.parts, part)
        return found


def _put(parts: list[ReadoutPart], part: ReadoutPart) -> None:
    """Add a part; a lens of several pipeline stages has one for the taps of each."""
    for other in parts:
        same = other.start == part.start and other.count == part.count
        if other.name == part.name and same and other.arrays:
            for label, array in part.arrays.items():
                other.arrays[label] = np.concatenate((other.arrays[label], array), 1)
            return
    parts.append(part)


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
    if entry.readout.kind == "custom":
        own = {"values": arrays[str(number)]}
        return ReadoutPart(name, start, entry.count, own)
    staged, taps = len(entry.readout.staged), len(entry.readout.taps)
    stop = entry.first + entry.num_rows
    own = {}
    for label, one in arrays.items():
        rows = one[entry.first : stop]
        rows = rows.reshape(entry.count, staged, *rows.shape[1:])
        # Probes and SAEs read a single tap, so their results have no axis for taps.
        single = entry.readout.kind in ("probe", "sae")
        own[label] = rows[:, 0] if single else rows[:, :taps]
    return ReadoutPart(name, start, entry.count, own)


class Receipts(Protocol):
    """A step's doses, possibly still being copied to the host."""

    def collect(self) -> dict[str, StepReceipt]:
        """Wait for the copies and return the doses by request id."""


class Counts(Protocol):
    """How often conditions have fired; valid once the step's output is."""

    def collect(self) -> Fired:
        """What was counted since the last call."""


@dataclass(frozen=True, slots=True)
class Additions:
    """What a step's output carries besides upstream's results; each may be None."""

    readouts: PendingReadouts | None = None
    receipts: Receipts | None = None
    fired: Counts | None = None

    def __bool__(self) -> bool:
        found = self.readouts, self.receipts, self.fired
        return any(one is not None for one in found)

    def put(self, output: ModelRunnerOutput) -> ModelRunnerOutput:
        """Wait for the copies to the host, and add the results to an output."""
        if self.readouts is not None:
            output.readouts = self.readouts.collect()
        if self.receipts is not None:
            output.receipts = self.receipts.collect()
        if self.fired is not None:
            output.fired = self.fired.collect()
        return output


class OutputWithAdditions(AsyncModelRunnerOutput):
    """Wraps a step's asynchronous output and adds further results to it."""

    def __init__(self, output: AsyncModelRunnerOutput, additions: Additions) -> None:
        self._output = output
        self._additions = additions

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the device and return the output with its additions."""
        return self._additions.put(self._output.get_output())


def attach(output: Any, additions: Additions) -> Any:
    """Add a step's further results to its output.

    Args:
        output: the return value of the runner's `sample_tokens`.
        additions: the results.

    """
    if output is None or not additions:
        return output
    if isinstance(output, AsyncModelRunnerOutput):
        return OutputWithAdditions(output, additions)
    if isinstance(output, ModelRunnerOutput) and output.req_ids:
        additions.put(output)
    return output

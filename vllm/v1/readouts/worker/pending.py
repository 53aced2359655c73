# SPDX-License-Identifier: Apache-2.0
"""A step's results on their way from the device to the engine core."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.readouts.plan import ReadoutPart, RequestReadouts
from vllm.v1.readouts.worker.program import Entry


@dataclass(slots=True)
class JobResult:
    """What one job found out."""

    entries: Sequence[Entry]
    shift: int
    """How many positions further the step is than the one that the entries name."""
    arrays: dict[str, torch.Tensor]
    """On the host, once the copy is done."""
    errors: dict[int, str] = field(default_factory=dict)
    """By number of the entry."""


@dataclass(slots=True)
class PendingReadouts:
    """Results of a step; `collect` waits for their copies."""

    results: list[JobResult]
    starts: dict[str, int]
    """Token position of each request's first row in the step."""
    done: "torch.cuda.Event | None" = None
    kept: list[Any] = field(default_factory=list)
    """Tensors that the device may still be reading."""

    def collect(self) -> dict[str, RequestReadouts]:
        """The results by request. Waits for the device."""
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
                of_request.parts.append(part)
        return found


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
        # Probes and SAEs are about one place, which needs no axis.
        single = entry.readout.kind in ("probe", "sae")
        own[label] = rows[:, 0] if single else rows[:, :taps]
    return ReadoutPart(name, start, entry.count, own)


class OutputWithReadouts(AsyncModelRunnerOutput):
    """The output of a step, to which its readouts are added when it is taken."""

    def __init__(
        self, output: AsyncModelRunnerOutput, pending: PendingReadouts
    ) -> None:
        """Wrap an output that is on its way itself."""
        self._output = output
        self._pending = pending

    def get_output(self) -> ModelRunnerOutput:
        """The output; waits for the device."""
        output = self._output.get_output()
        output.readouts = self._pending.collect()
        return output


def attach(output: Any, pending: PendingReadouts | None) -> Any:
    """A step's output with its readouts.

    Args:
        output: what a runner's `sample_tokens` returned.
        pending: the step's results, None where nothing was read out.

    """
    if pending is None or output is None:
        return output
    if isinstance(output, AsyncModelRunnerOutput):
        return OutputWithReadouts(output, pending)
    if isinstance(output, ModelRunnerOutput) and output.req_ids:
        output.readouts = pending.collect()
    return output

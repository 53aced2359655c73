# SPDX-License-Identifier: Apache-2.0
"""Doses: how far each operation moves the stream at each token, for receipts.

Programs of requests with a receipt store a dose per token and effect in memory on the
device. After the pass these rows are copied to the host without waiting for it, and go
out with the step's output. Programs of other requests store nothing.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.residual.step_view import StepView
from vllm.v1.steering.receipts import ReceiptPart, StepReceipt
from vllm.v1.steering.worker.phase import Phase


@dataclass(frozen=True, slots=True)
class Measured:
    """Consecutive tokens of a request in a step, all of one phase."""

    req_id: str
    position: int
    """Position of the first token in its sequence."""
    token: int
    """Index of the first token in the step."""
    count: int
    phase: Phase


class StepDoses:
    """The doses of the current step. Engine thread only."""

    def __init__(self, device: torch.device, reports: bool) -> None:
        """Start without any.

        Args:
            device: of the doses.
            reports: whether this rank's output is the one that is sent.

        """
        self._device = device
        self._reports = reports
        self._planned: list[Measured] = []
        self._starts: dict[str, int] = {}
        self._pending: PendingDoses | None = None

    @property
    def is_used(self) -> bool:
        """Whether the planned step measures doses."""
        return bool(self._planned)

    def plan_nothing(self) -> None:
        """Plan a pass that measures nothing."""
        self._planned = []

    def plan(
        self,
        view: StepView,
        pairs: Sequence[tuple[int, int]],
        lengths: Sequence[int],
        phases: Mapping[int, Phase],
    ) -> None:
        """Find the tokens whose doses the next pass measures.

        Args:
            view: the step's requests and tokens.
            pairs: prefill and decode row of each request.
            lengths: prompt length of each request, in tokens.
            phases: phases by table row, for rows with operations.

        """
        self._planned = []
        if not any(phase.effects for phase in phases.values()):
            return
        first_row = view.first_row
        for number, (of_prompt, of_decode) in enumerate(pairs):
            start = int(view.num_computed[number])
            stop = start + int(view.num_scheduled[number])
            middle = min(max(lengths[number], start), stop)
            offset, req_id = int(first_row[number]) - start, view.req_ids[number]
            for row, first, last in (
                (of_prompt, start, middle),
                (of_decode, middle, stop),
            ):
                phase = phases.get(row)
                if phase is None or not phase.effects or first == last:
                    continue
                one = Measured(req_id, first, offset + first, last - first, phase)
                self._planned.append(one)
                self._starts[req_id] = start

    def begin(self) -> None:
        """Mark all tokens as without doses, before the pass."""
        if not self._planned:
            return
        stop = max(one.token + one.count for one in self._planned)
        memories = {id(one.phase.doses): one.phase.doses for one in self._planned}
        for memory in memories.values():
            memory[:stop].fill_(torch.nan)

    def end(self) -> None:
        """Start the copy of the doses to the host, after the pass is queued."""
        planned, self._planned = self._planned, []
        starts, self._starts = self._starts, {}
        if not planned or not self._reports:
            return
        by_memory: dict[int, list[Measured]] = defaultdict(list)
        for one in planned:
            by_memory[id(one.phase.doses)].append(one)
        copies = [(alike, self._copied(alike)) for alike in by_memory.values()]
        done = None
        if self._device.type == "cuda":
            done = torch.cuda.Event(blocking=True)
            done.record()
        self._pending = PendingDoses(copies, starts, done)

    def _copied(self, alike: Sequence[Measured]) -> torch.Tensor:
        """The rows of the tokens, on their way to the host."""
        tokens = np.concatenate(
            [np.arange(one.token, one.token + one.count) for one in alike]
        )
        index = async_tensor_h2d(tokens, self._device, torch.int64)
        rows = alike[0].phase.doses.index_select(0, index)
        if rows.device.type == "cpu":
            return rows
        host = torch.empty_like(rows, device="cpu", pin_memory=True)
        return host.copy_(rows, non_blocking=True)

    def take(self) -> "PendingDoses | None":
        """Remove and return the doses of the last step, if it measured any."""
        pending, self._pending = self._pending, None
        return pending


class PendingDoses(NamedTuple):
    """The doses of a step, possibly still being copied to the host."""

    copies: Sequence[tuple[Sequence[Measured], torch.Tensor]]
    starts: Mapping[str, int]
    done: "torch.cuda.Event | None"

    def collect(self) -> dict[str, StepReceipt]:
        """Wait for the copies and return the doses by request id."""
        if self.done is not None:
            self.done.synchronize()
        found: dict[str, StepReceipt] = {}
        for alike, rows in self.copies:
            doses, at = rows.numpy(), 0
            for one in alike:
                effects = one.phase.effects
                own = doses[at : at + one.count, : len(effects)]
                at += one.count
                of_request = found.setdefault(
                    one.req_id, StepReceipt(self.starts[one.req_id], [])
                )
                part = ReceiptPart(one.position, effects, np.ascontiguousarray(own))
                of_request.parts.append(part)
        for receipt in found.values():
            receipt.parts.sort(key=lambda part: part.start)
        return found

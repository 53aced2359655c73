# SPDX-License-Identifier: Apache-2.0
"""Doses: how far each operation moves the stream at each token, for receipts.

Programs of requests with a receipt store a dose per token and effect in memory on the
device. After the pass these rows are copied to the host without waiting for it, and go
out with the step's output. Programs of other requests store nothing. With pipeline
stages the rows travel with the hidden states, and each stage fills in its columns.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
import torch

from vllm.v1.residual.receipts import ReceiptPart, StepReceipt
from vllm.v1.steering.worker.dose_memory import DoseMemory
from vllm.v1.steering.worker.phase import Phase
from vllm.v1.steering.worker.requests import RequestTokens


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


class Route(Enum):
    """Where a rank's doses go."""

    OUTPUT = "output"
    """To the step's output, which this rank returns."""
    NEXT_STAGE = "next stage"
    """To the next pipeline stage, with the hidden states of their step."""
    NOWHERE = "nowhere"
    """Another rank of the last stage has the same."""


class StepDoses:
    """The doses of the current step. Engine thread only."""

    def __init__(self, memory: DoseMemory, route: Route) -> None:
        """Start without any.

        Args:
            memory: in which programs store them.
            route: where they go.

        """
        self._memory = memory
        self._route = route
        self._planned: list[Measured] = []
        self._starts: dict[str, int] = {}
        self._pending: PendingDoses | None = None
        self.earlier: torch.Tensor | None = None
        """Those of earlier pipeline stages, as `take_sent` of the last one returned
        them; NaN in the columns of this stage and of later ones."""
        self._sent: torch.Tensor | None = None

    @property
    def is_used(self) -> bool:
        """Whether the planned step measures doses."""
        return bool(self._planned)

    def plan_nothing(self) -> None:
        """Plan a pass that measures nothing."""
        self._planned = []

    def plan(
        self, requests: Iterable[RequestTokens], phases: Mapping[int, Phase]
    ) -> None:
        """Find the tokens whose doses the next pass measures.

        Args:
            requests: of the step.
            phases: phases by table row, for rows with operations.

        """
        self._planned = []
        if not any(phase.effects for phase in phases.values()):
            return
        for one in requests:
            for row, first, stop in one.parts:
                phase = phases.get(row)
                if phase is None or not phase.effects:
                    continue
                place = first, one.offset + first, stop - first
                self._planned.append(Measured(one.req_id, *place, phase))
                self._starts[one.req_id] = one.start

    def begin(self) -> None:
        """Mark all tokens as without doses, before the pass."""
        if self._planned:
            self._memory.clear(max(one.token + one.count for one in self._planned))

    def end(self) -> None:
        """Start the copy of the doses to the host, after the pass is queued."""
        planned, self._planned = self._planned, []
        starts, self._starts = self._starts, {}
        earlier, self.earlier = self.earlier, None
        if not planned or self._route is Route.NOWHERE:
            return
        tokens = [np.arange(one.token, one.token + one.count) for one in planned]
        width = max(len(one.phase.effects) for one in planned)
        rows = self._memory.rows(np.concatenate(tokens), width)
        if earlier is not None:  # Each stage has columns of its own.
            rows = torch.where(rows.isnan(), earlier.view_as(rows), rows)
        if self._route is Route.NEXT_STAGE:
            self._sent = rows.flatten()
            return
        done = None
        if rows.is_cuda:
            host = torch.empty_like(rows, device="cpu", pin_memory=True)
            rows = host.copy_(rows, non_blocking=True)
            done = torch.cuda.Event(blocking=True)
            done.record()
        self._pending = PendingDoses(planned, rows, starts, done)

    def take_sent(self) -> torch.Tensor | None:
        """Remove and return what goes to the next stage, `[values]`, if anything."""
        sent, self._sent = self._sent, None
        return sent

    def take(self) -> "PendingDoses | None":
        """Remove and return the doses of the last step, if it measured any."""
        pending, self._pending = self._pending, None
        return pending


class PendingDoses(NamedTuple):
    """The doses of a step, possibly still being copied to the host."""

    planned: Sequence[Measured]
    rows: torch.Tensor  # [tokens, effects], on the host
    starts: Mapping[str, int]
    done: "torch.cuda.Event | None"

    def collect(self) -> dict[str, StepReceipt]:
        """Wait for the copy and return the doses by request id."""
        if self.done is not None:
            self.done.synchronize()
        found: dict[str, StepReceipt] = {}
        doses, at = self.rows.numpy(), 0
        for one in self.planned:
            effects = one.phase.effects
            own = doses[at : at + one.count, : len(effects)]
            at += one.count
            of_request = found.setdefault(
                one.req_id, StepReceipt(self.starts[one.req_id], [])
            )
            part = ReceiptPart(one.position, effects, np.ascontiguousarray(own))
            of_request.parts.append(part)
        return found

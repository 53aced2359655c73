# SPDX-License-Identifier: Apache-2.0
"""Doses: how far each operation moves the stream at each token, for receipts.

Programs of requests with a receipt store a dose per token and effect in memory on the
device. After the pass these rows are copied to the host without waiting for it, and go
out with the step's output. Programs of other requests store nothing. With pipeline
stages the rows travel with the hidden states, and each stage fills in its columns.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
import torch

from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.residual.receipts import ReceiptPart, StepReceipt
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

    def __init__(self, device: torch.device, route: Route) -> None:
        """Start without any.

        Args:
            device: of the doses.
            route: where they go.

        """
        self._device = device
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
        earlier, self.earlier = self.earlier, None
        if not planned or self._route is Route.NOWHERE:
            return
        by_memory: dict[int, list[Measured]] = defaultdict(list)
        for one in planned:
            by_memory[id(one.phase.doses)].append(one)
        groups = list(by_memory.values())
        rows = [self._rows(alike) for alike in groups]
        if earlier is not None:
            rows = _completed(rows, earlier)
        if self._route is Route.NEXT_STAGE:
            self._sent = torch.cat([one.flatten() for one in rows])
            return
        copies = list(zip(groups, map(_on_host, rows), strict=True))
        done = None
        if self._device.type == "cuda":
            done = torch.cuda.Event(blocking=True)
            done.record()
        self._pending = PendingDoses(copies, starts, done)

    def _rows(self, alike: Sequence[Measured]) -> torch.Tensor:
        """The doses `[tokens, effects]` of tokens whose programs share memory."""
        tokens = np.concatenate(
            [np.arange(one.token, one.token + one.count) for one in alike]
        )
        index = async_tensor_h2d(tokens, self._device, torch.int64)
        width = max(len(one.phase.effects) for one in alike)
        return alike[0].phase.doses[:, :width].index_select(0, index)

    def take_sent(self) -> torch.Tensor | None:
        """Remove and return what goes to the next stage, `[values]`, if anything."""
        sent, self._sent = self._sent, None
        return sent

    def take(self) -> "PendingDoses | None":
        """Remove and return the doses of the last step, if it measured any."""
        pending, self._pending = self._pending, None
        return pending


def _completed(
    rows: Sequence[torch.Tensor], earlier: torch.Tensor
) -> list[torch.Tensor]:
    """A stage's rows, with the doses of earlier stages `[values]` where it has none."""
    found = earlier.split([one.numel() for one in rows])
    return [
        torch.where(own.isnan(), before.view_as(own), own)
        for own, before in zip(rows, found, strict=True)
    ]


def _on_host(rows: torch.Tensor) -> torch.Tensor:
    """Rows on their way to the host."""
    if rows.device.type == "cpu":
        return rows
    host = torch.empty_like(rows, device="cpu", pin_memory=True)
    return host.copy_(rows, non_blocking=True)


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

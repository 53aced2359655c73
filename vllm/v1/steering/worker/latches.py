# SPDX-License-Identifier: Apache-2.0
"""Gates that open at any token of a step, also of a prompt, and stay open.

The tokens of a prompt are computed together, so the pass itself notes the first token
of each request that opens a gate; instructions at later hook points read the note.
Before a pass the notes of its requests are emptied; after it they become positions,
which hold in later steps.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from vllm.model_executor.layers.residual.program import (
    NEVER,
    OPENED,
    SEGMENT,
)
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.steering.receipts import FIRES_ABOVE
from vllm.v1.steering.worker.fired import FiredCounts
from vllm.v1.steering.worker.gates import Deciding


class Segment(NamedTuple):
    """The tokens of a request in a step."""

    place: int
    """The row of the request."""
    token: int
    """Index of the first token in the step."""
    position: int
    """Position of the first token in its sequence."""
    num_tokens: int
    decided: Sequence[tuple[Deciding, range]]
    """The gates that its tokens may open, and the tokens of the step that decide."""


class StepLatches:
    """The segments of the planned step. Engine thread only."""

    def __init__(self, device: torch.device, fired: FiredCounts | None) -> None:
        """Start without any.

        Args:
            device: of the gates.
            fired: counts the tokens at which gates are open; None to count none.

        """
        self._device = device
        self._fired = fired
        self._segments: list[Segment] = []

    def __bool__(self) -> bool:
        return bool(self._segments)

    def clear(self) -> None:
        """Plan a pass without such gates."""
        self._segments = []

    def add(self, segment: Segment) -> None:
        """Plan the tokens of a request for the next pass."""
        self._segments.append(segment)

    def load(self, gates: torch.Tensor) -> None:
        """Empty the notes, and write where each token finds its request's."""
        if not self._segments:
            return
        noted = gates.view(torch.int32)
        firsts = [one.token for one in self._segments]
        counts = [one.num_tokens for one in self._segments]
        rows = [
            np.arange(one.token, one.token + one.num_tokens) for one in self._segments
        ]
        table = np.stack([np.concatenate(rows), np.repeat(firsts, counts)])
        tokens, segments = async_tensor_h2d(table, self._device, torch.int64).unbind()
        noted[:, SEGMENT].index_copy_(0, tokens, segments.int())
        rows_of = async_tensor_h2d(firsts, self._device, torch.int64)
        noted[:, OPENED:SEGMENT].index_fill_(0, rows_of, NEVER)

    def save(
        self, gates: torch.Tensor, since: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Keep what the pass has noted.

        Args:
            gates: as the pass has left them, `[T, GATE_COLUMNS]`.
            since: the position from which each gate of a request holds, `[requests,
                GATES]`, int32; updated.
            value: the gates that hold, `[requests, GATES]`; updated.

        """
        if not self._segments:
            return
        noted = gates.view(torch.int32)
        table = [(one.token, one.place, one.position) for one in self._segments]
        columns = np.array(table, dtype=np.int64).T.copy()
        tokens, places, starts = async_tensor_h2d(
            columns, self._device, torch.int64
        ).unbind()
        opened = noted[tokens, OPENED:SEGMENT]  # [segments, GATES]
        shift = (starts - tokens).int()[:, None]
        opened = torch.where(opened == NEVER, opened, opened + shift)
        since[places] = torch.minimum(since[places], opened)
        value[places] = torch.where(opened == NEVER, value[places], 1.0)
        for one in self._segments:
            if one.num_tokens > 1:  # A single token has counted itself.
                self._count_open(one, gates)

    def _count_open(self, one: Segment, gates: torch.Tensor) -> None:
        """Count the tokens after the one that has opened a gate as open, too."""
        noted = gates.view(torch.int32)
        for deciding, tokens in one.decided:
            if not tokens:
                continue
            column, rows = deciding.gate.column, slice(tokens.start, tokens.stop)
            opened = noted[one.token, OPENED + column]
            index = torch.arange(tokens.start, tokens.stop, device=self._device)
            before = gates[rows, column]
            now = torch.where(index >= opened, 1.0, before)
            if self._fired is not None:
                grown = (now > FIRES_ABOVE).sum() - (before > FIRES_ABOVE).sum()
                self._fired.grow(deciding.count, grown)
            if deciding.doses is not None:
                deciding.doses[rows] = now

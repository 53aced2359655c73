# SPDX-License-Identifier: Apache-2.0
"""Gates whose decisions hold for later tokens.

A decision at the last prompt token, or by the mean over the prompt, holds for all
generated tokens; other decisions hold from the first token that fires, which may be one
of the prompt. Both are kept per request on the device, and copied to and from the gate
rows before and after a pass, in the order of the device's stream: nothing waits for the
host, and memory that CUDA graphs read keeps its address. A decision is made once: a
request that is preempted and recomputes its tokens keeps it.

The tokens of a prompt are computed together, so the pass itself notes the first token
of each request that opens a gate; instructions at later hook points read the note.
Before a pass the notes of its requests are emptied; after it they become positions,
which hold in later steps.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from vllm.model_executor.layers.residual.program import (
    GATES,
    NEVER,
    OPENED,
    SEGMENT,
)
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.steering.conditions import MAX_CONDITIONS
from vllm.v1.steering.receipts import FIRES_ABOVE
from vllm.v1.steering.worker.fired import FiredCounts
from vllm.v1.steering.worker.gates import Deciding, decided
from vllm.v1.steering.worker.phase import Phase
from vllm.v1.steering.worker.requests import RequestTokens


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

    def __init__(self, device: torch.device, fired: FiredCounts) -> None:
        """Start without any.

        Args:
            device: of the gates.
            fired: counts the tokens at which gates are open.

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
            grown = (now > FIRES_ABOVE).sum() - (before > FIRES_ABOVE).sum()
            self._fired.grow(deciding.count, grown)
            if deciding.doses is not None:
                deciding.doses[rows] = now


FIRST_ROOM = 16
"""Number of requests for which memory is allocated at first."""


class Decision(NamedTuple):
    """Prompt tokens of a step, the last of which decides for later ones, or the mean.

    For a mean, those of a part of the prompt are added up.
    """

    deciding: Deciding
    rows: slice
    """Their rows in the step."""
    place: int
    """The row of their request."""
    begins: bool
    """Whether they are the prompt's first tokens."""
    length: int
    """The length of the prompt if they are its last tokens, else 0."""


class HeldGates:
    """The decisions of each request. Used on the engine's thread only."""

    def __init__(self, device: torch.device, fired: FiredCounts) -> None:
        """Start without decisions.

        Args:
            device: of the gates.
            fired: counts the decisions.

        """
        self._device = device
        self._fired = fired
        self._value = torch.zeros(FIRST_ROOM, GATES, device=device)
        """Gate values `[requests, columns]`, float32, valid from the positions in
        `_since`."""
        self._since = torch.full(
            (FIRST_ROOM, GATES), NEVER, dtype=torch.int32, device=device
        )
        self._total = torch.zeros(FIRST_ROOM, GATES, dtype=torch.float64, device=device)
        """Sums of probes' values over a prompt, of which the mean decides."""
        self._places: dict[str, int] = {}
        self._free = list(range(FIRST_ROOM))
        self._decided: set[str] = set()
        self._reads: list[tuple[int, int, int, int]] = []
        """For the planned step: row of a token, row of its request, its position, and
        the number of consecutive tokens."""
        self._decides: list[Decision] = []
        self._fires: list[tuple[int, int, int, int]] = []
        """Token row, request row, column and position, of gates that stay closed unless
        the token opens them."""
        self._latches = StepLatches(device, fired)

    @property
    def is_used(self) -> bool:
        """Whether the planned step reads or makes held decisions."""
        return bool(self._reads or self._decides or self._latches)

    def forget(self, finished: Iterable[str]) -> None:
        """Drop the decisions of finished requests."""
        for req_id in finished:
            self._decided.discard(req_id)
            if (place := self._places.pop(req_id, None)) is not None:
                self._free.append(place)

    def forget_engines(self) -> None:
        """Drop all decisions of the engine's conditions, which have changed."""
        self._since[:, :MAX_CONDITIONS] = NEVER

    def plan_nothing(self) -> None:
        """Plan a pass that neither reads nor decides gates."""
        self._reads, self._decides, self._fires = [], [], []
        self._latches.clear()

    def plan(
        self, requests: Iterable[RequestTokens], phases: Mapping[int, Phase]
    ) -> None:
        """Plan which gates the next pass reads and decides.

        Args:
            requests: of the step.
            phases: phases by table row, for rows with operations.

        """
        self.plan_nothing()
        if not any(one.deciding or one.held for one in phases.values()):
            return
        for one in requests:
            prompt, decode = map(phases.get, one.rows)
            deciding = () if prompt is None else prompt.deciding
            held = () if decode is None else decode.held
            if not deciding and not held and (prompt is None or not prompt.spreading):
                continue
            place, offset = self._place(one.req_id), one.offset
            undecided = one.start < one.length and one.req_id not in self._decided
            ends = undecided and one.length <= one.stop
            if ends:
                self._decided.add(one.req_id)
            if undecided:
                rows_of = slice(offset + one.start, offset + one.middle)
                length = one.length if ends else 0
                self._decides += [
                    Decision(each, rows_of, place, one.start == 0, length)
                    for each in deciding
                    if ends or each.gate.condition.mean
                ]
            self._plan_latches(one, phases, place)
            if one.middle == one.stop or decode is None or not held:
                continue
            count = one.stop - one.middle
            self._reads.append((offset + one.middle, place, one.middle, count))
            last = one.stop - 1
            self._fires += [
                (offset + last, place, column, last) for column in decode.latched
            ]

    def _plan_latches(
        self, one: RequestTokens, phases: Mapping[int, Phase], place: int
    ) -> None:
        """Plan the gates that any of a request's tokens may open.

        Args:
            one: the request.
            phases: phases by table row.
            place: the row of the request here.

        """
        decided = [
            (each, range(one.offset + first, one.offset + stop))
            for row, first, stop in one.parts
            if row in phases
            for each in phases[row].spreading
        ]
        if not decided:
            return
        token, start = one.offset + one.start, one.start
        self._latches.add(Segment(place, token, start, one.stop - start, decided))
        if start < one.middle:
            self._reads.append((token, place, start, one.middle - start))

    def _place(self, req_id: str) -> int:
        place = self._places.get(req_id)
        if place is None:
            if not self._free:
                self._grow()
            place = self._places[req_id] = self._free.pop()
            self._since[place] = NEVER
        return place

    def _grow(self) -> None:
        room = len(self._value)
        self._value = torch.cat([self._value, torch.zeros_like(self._value)])
        self._since = torch.cat([self._since, torch.full_like(self._since, NEVER)])
        self._total = torch.cat([self._total, torch.zeros_like(self._total)])
        self._free.extend(range(room, 2 * room))

    def load(self, gates: torch.Tensor) -> None:
        """Write the held decisions to the gate rows `[tokens, columns]`."""
        if not self._reads:
            return
        rows, places, positions = self._tokens()
        holds = self._since[places] <= positions[:, None]
        gates[rows, :GATES] = torch.where(holds, self._value[places], 0.0)
        self._latches.load(gates)

    def _tokens(self) -> torch.Tensor:
        """Rows, rows of requests, and positions of the tokens that read gates."""
        table = np.array(self._reads, dtype=np.int64).T
        counts = table[3]
        each = np.repeat(table[:3], counts, axis=1)
        within = np.arange(each.shape[1]) - np.repeat(
            np.cumsum(counts) - counts, counts
        )
        each[[0, 2]] += within
        return async_tensor_h2d(each, self._device, torch.int64)

    def save(self, gates: torch.Tensor) -> None:
        """Store the decisions that the pass has made."""
        self._latches.save(gates, self._since, self._value)
        for one in self._decides:
            self._decide(one, gates)
        if self._fires:
            rows, places, columns, since = self._indices(self._fires)
            before = self._since[places, columns]
            opened = (gates[rows, columns] > 0) & (before > since)
            self._value[places, columns] = 1.0
            self._since[places, columns] = torch.where(opened, since.int(), before)
        self.plan_nothing()  # A following dummy batch is not planned.

    def _decide(self, one: Decision, gates: torch.Tensor) -> None:
        """Keep what the prompt's last token has decided, or what the mean decides."""
        condition, column = one.deciding.gate
        gate = gates[one.rows.stop - 1, column]
        if condition.mean:
            total = self._total[one.place, column]
            if one.begins:
                total.zero_()
            total += gates[one.rows, column].double().sum()
            if not one.length:
                return
            gate = decided(condition, total / one.length).float()
            if one.deciding.doses is not None:
                one.deciding.doses[one.rows.stop - 1] = gate
        self._value[one.place, column] = gate
        self._since[one.place, column] = one.length
        self._fired.grow(one.deciding.count, (gate > FIRES_ABOVE).sum())

    def _indices(self, found: Sequence[tuple[int, ...]]) -> tuple[torch.Tensor, ...]:
        table = np.array(found, dtype=np.int64).T.copy()
        return async_tensor_h2d(table, self._device, torch.int64).unbind()

# SPDX-License-Identifier: Apache-2.0
"""Tables of steering vectors: one row per configuration and phase, at every tap."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from vllm.model_executor.layers.residual.capture_op import ALIGNMENT
from vllm.utils.math_utils import round_up
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.residual.step_view import StepView
from vllm.v1.residual.tap import INNER_POINTS, Shapes, Tap, width_at
from vllm.v1.steering.plan import (
    NO_STEERING,
    PackedVectors,
    SteeringTiers,
    Vector,
    total,
)
from vllm.v1.steering.slots import (
    GLOBAL_DECODE_ROW,
    GLOBAL_PREFILL_ROW,
    ZERO_ROW,
    decode_row,
    prefill_row,
)
from vllm.v1.steering.worker.bank import Bank
from vllm.v1.steering.worker.dose_memory import DoseMemory
from vllm.v1.steering.worker.features import SAEs
from vllm.v1.steering.worker.fired import FiredCounts
from vllm.v1.steering.worker.gates import Gate, deciding, readers_of
from vllm.v1.steering.worker.phase import Phase
from vllm.v1.steering.worker.programs import ProgramIndex


class TokenRows:
    """The table row of each token of a step, in memory that CUDA graphs read."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.index = torch.full((size,), ZERO_ROW, dtype=torch.int32, device=device)
        self.rows: npt.NDArray[np.int32] | None = None
        """The plan."""
        self._written = 0
        self._unchanged = True
        """Whether the memory already holds the plan."""

    def plan(self, rows: npt.NDArray[np.int32] | None) -> None:
        """Set the rows of the next step; None: no token is steered."""
        self.rows = rows
        self._unchanged = rows is None and not self._written

    def write(self) -> None:
        """Write the plan, unless the memory holds it already."""
        if self._unchanged:
            return
        num_tokens = 0 if self.rows is None else len(self.rows)
        before, self._written = self._written, max(self._written, num_tokens)
        if before > num_tokens:
            self.index[num_tokens:before].fill_(ZERO_ROW)
        if self.rows is not None:
            async_tensor_h2d(self.rows, out=self.index[:num_tokens])
        self._written = num_tokens
        self._unchanged = True


def token_rows(
    rows: Sequence[tuple[int, int]], prompt_lengths: Sequence[int], view: StepView
) -> npt.NDArray[np.int32]:
    """The row of each token of a step `[num_tokens]`; positions decide the phase.

    Most steps have one or two tokens per request, for which a Python loop is faster
    than NumPy calls.

    Args:
        rows: prefill and decode row of each request.
        prompt_lengths: prompt length of each request, in tokens.
        view: the step's requests and tokens.

    """
    found: list[int] = []
    counts: list[int] = []
    computed, scheduled = view.num_computed.tolist(), view.num_scheduled.tolist()
    for (prefill, decode), length, start, count in zip(
        rows, prompt_lengths, computed, scheduled, strict=True
    ):
        of_prompt = min(max(length - start, 0), count)
        if of_prompt:
            found.append(prefill)
            counts.append(of_prompt)
        if of_prompt < count:
            found.append(decode)
            counts.append(count - of_prompt)
    of_each = np.array(found, dtype=np.int32)
    return of_each if len(found) == sum(counts) else np.repeat(of_each, counts)


class Row(NamedTuple):
    """The content of a table row."""

    vectors: dict[Tap, Vector]
    """Vectors by tap; other taps get rows of zeros."""
    phase: Phase | None
    """Operations other than plain addition; None if there are none."""


PhaseName: TypeAlias = Literal["prefill", "decode"]
Rows = dict[int, Row]
NOWHERE: frozenset[Tap] = frozenset()


class SteeringTables:
    """The vectors of all configurations, in device memory `[taps, rows, hidden_size]`.

    CUDA graphs hold its address; its content changes between steps only, in the order
    of the device's stream.
    """

    def __init__(
        self,
        taps: Sequence[Tap],
        num_rows: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        num_tokens: int,
        bank_bytes: int,
        saes: SAEs,
        shapes: Shapes,
    ) -> None:
        self._taps = frozenset(taps)
        # Inside the block, programs perform plain additions as well.
        added = [tap for tap in taps if tap[1] not in INNER_POINTS]
        self._columns = {tap: column for column, tap in enumerate(added)}
        # x + -0.0 is x for every x, while -0.0 + 0.0 is 0.0: rows of -0.0 change no
        # bit.
        length = round_up(num_rows, ALIGNMENT // dtype.itemsize)
        self._table = torch.full(
            (len(added), length, width), -0.0, dtype=dtype, device=device
        )
        self._filled: dict[int, frozenset[Tap]] = {}
        """The taps at which each row adds something; equal sets are one object."""
        self.loaded: dict[int, SteeringTiers] = {}
        """The configuration of each loaded slot."""
        self.tiers = NO_STEERING
        """The global vectors in force."""
        self.programs = ProgramIndex(taps, num_rows, num_tokens, device)
        """The programs of operations, with the same row numbers."""
        self.bank = Bank(partial(width_at, shapes, width), device, bank_bytes, saes)
        """The vectors of those operations."""
        self.doses = DoseMemory(num_tokens, device)
        """The doses of tokens whose requests asked for a receipt."""
        self.fired = FiredCounts(device)
        """The number of tokens at which conditions have fired."""
        self.phases: dict[int, Phase] = {}
        """Phases by row, for rows with operations."""

    def at(self, tap: Tap) -> torch.Tensor | None:
        """The table `[rows, hidden_size]` of one tap; None inside the block."""
        return self._table[self._columns[tap]] if tap in self._columns else None

    @property
    def num_bytes(self) -> int:
        """Bytes of device memory of all tables."""
        return self._table.nbytes + self.programs.num_bytes

    @property
    def is_empty(self) -> bool:
        """Whether requests without a slot are unsteered."""
        return not self.tiers

    def filled_taps(self, rows: Iterable[int]) -> frozenset[Tap]:
        """The taps of this process at which any of `rows` adds something."""
        distinct = {self._filled.get(row, NOWHERE) for row in rows}
        return distinct.pop() if len(distinct) == 1 else NOWHERE.union(*distinct)

    def load(self, slot: int, tiers: SteeringTiers) -> None:
        """Load a configuration into a slot."""
        self.loaded[slot] = tiers
        self.write(self._rows_of(slot, tiers, self.tiers))

    def rows_with(self, tiers: SteeringTiers) -> Rows:
        """The content of every used row under other global vectors.

        This changes nothing, so a failure on one rank leaves all ranks as they were.
        """
        rows: Rows = {
            GLOBAL_PREFILL_ROW: self._row(tiers, NO_STEERING, "prefill"),
            GLOBAL_DECODE_ROW: self._row(tiers, NO_STEERING, "decode"),
        }
        for slot, loaded in self.loaded.items():
            rows.update(self._rows_of(slot, loaded, tiers))
        return rows

    def set_global(self, tiers: SteeringTiers, rows: Rows) -> None:
        """Apply global vectors and the rows computed for them."""
        self.tiers = tiers
        self.write(rows)

    def write(self, rows: Rows) -> None:
        """Overwrite rows in full, without synchronizing with the device."""
        sent: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for row, (vectors, phase) in rows.items():
            self._set_phase(row, phase)
            of_taps = self._table[:, row]
            filled = frozenset(vectors)
            emptied = self._filled.get(row, NOWHERE) - filled
            if emptied:
                of_taps.index_fill_(0, self._where(emptied), -0.0)
            same = (other for other in self._filled.values() if other == filled)
            self._filled[row] = next(same, filled)
            if not vectors:
                continue
            if id(vectors) not in sent:  # Both phases may share vectors.
                sent[id(vectors)] = self._where(vectors), self._on_device(vectors)
            of_taps.index_copy_(0, *sent[id(vectors)])

    def _set_phase(self, row: int, phase: Phase | None) -> None:
        self.phases.pop(row, None)
        if phase is not None and not phase.is_empty:
            self.phases[row] = phase
        self.programs.write(row, {} if phase is None else phase.fixed)

    def _where(self, taps: Iterable[Tap]) -> torch.Tensor:
        columns = [self._columns[tap] for tap in taps]
        return async_tensor_h2d(columns, self._table.device, torch.int64)

    def _on_device(self, vectors: Mapping[Tap, Vector]) -> torch.Tensor:
        """The vectors `[len(vectors), hidden_size]` in the table's dtype."""
        rows = np.stack(list(vectors.values()))
        found = async_tensor_h2d(rows, self._table.device, self._table.dtype)
        return found.masked_fill_(found == 0, -0.0)

    def _rows_of(self, slot: int, own: SteeringTiers, shared: SteeringTiers) -> Rows:
        """Both rows of a slot; they share vectors if the phases do not differ."""
        prefill = self._row(shared, own, "prefill")
        decode = prefill
        if shared.prefill or shared.decode or own.prefill or own.decode:
            decode = self._row(shared, own, "decode")
        return {prefill_row(slot): prefill, decode_row(slot): decode}

    def _row(self, shared: SteeringTiers, own: SteeringTiers, phase: PhaseName) -> Row:
        """The content of a phase's row at the taps of this process."""
        ours, theirs = (_parts(tiers, phase) for tiers in (shared, own))
        sums = total([*ours, *theirs])
        added = {tap: v for tap, v in sums.items() if tap in self._columns}
        readers = readers_of(shared, ours, True) + readers_of(own, theirs, False)
        later: list[Gate] = []
        if phase == "prefill":
            later += deciding(readers_of(shared, [shared.decode], True))
            later += deciding(readers_of(own, [own.decode], False))
        memory = self.doses if own.receipt else None
        if not readers and not later and (memory is None or not sums):
            return Row(added, None)
        for condition in (*shared.conditions, *own.conditions):
            self.fired.place(condition)  # In the same order at all pipeline stages.
        made = Phase(
            readers,
            later,
            sums,
            self._taps,
            self.bank,
            self.fired,
            self.programs.gates,
            memory,
        )
        return Row({t: v for t, v in added.items() if t not in made.taps}, made)


def _parts(tiers: SteeringTiers, phase: PhaseName) -> tuple[PackedVectors | None, ...]:
    return tiers.base, tiers.prefill if phase == "prefill" else tiers.decode

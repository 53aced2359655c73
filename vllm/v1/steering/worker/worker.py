# SPDX-License-Identifier: Apache-2.0
"""Steering in one worker process: what the runner's adapter talks to."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import lt
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from vllm.model_executor.layers.residual.point import ResidualTap
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.capture.staging.blocks import Decoding, StepView
from vllm.v1.steering.plan import SteeringTiers, Tap
from vllm.v1.steering.slots import (
    GLOBAL_DECODE_ROW,
    GLOBAL_PREFILL_ROW,
    ZERO_ROW,
    decode_row,
    prefill_row,
)
from vllm.v1.steering.wire import SteeringStep
from vllm.v1.steering.worker.row_edits import plan_edits, row_edit
from vllm.v1.steering.worker.tables import NOWHERE, Rows, SteeringTables

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PADDING = 64
"""Rows beyond the largest batch that padding may reach."""


class WorkerSteering:
    """Loads tables and says which row steers each token of a step.

    All methods are called on the engine's thread, on every rank alike.
    """

    def __init__(
        self,
        vllm_config: "VllmConfig",
        taps: Sequence[Tap],
        width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        rows = vllm_config.steering_config.num_rows
        self.tables = SteeringTables(taps, rows, width, dtype, device)
        graphs = vllm_config.compilation_config.max_cudagraph_capture_size or 0
        budget = vllm_config.scheduler_config.max_num_batched_tokens
        size = max(budget, graphs) + PADDING
        # Recorded graphs hold the address.
        self.row_index = torch.full((size,), ZERO_ROW, dtype=torch.int32, device=device)
        self._slots: dict[str, int] = {}
        self._prompt_lengths: dict[str, int] = {}
        self._rows: npt.NDArray[np.int32] | None = None
        self._written = 0
        self._unchanged = False
        """Whether `row_index` holds what the planned step reads."""
        self._launches: frozenset[int] = frozenset()
        self._last_ops: tuple[frozenset[Tap], frozenset[int]] = NOWHERE, frozenset()
        """The ops of some taps: those that were asked for last."""
        self._decoding: Decoding | None = None
        """The last step, if the next may be steered like it."""
        self._taps: dict[Tap, ResidualTap] = {}
        self.addresses = {tap: self.tables.at(tap).data_ptr() for tap in taps}
        """What the op of each tap is known by, as in `Launch`."""
        self._edited_taps: set[Tap] = set()
        self._staged: tuple[SteeringTiers, Rows] | None = None
        self.eager_steps: Counter[str] = Counter()
        """Steps that could run neither compiled nor recorded, by the reason."""

    def tensors(self, tap: Tap) -> tuple[torch.Tensor, torch.Tensor]:
        """The table `[rows, hidden_size]` of a hook point, and each token's row."""
        return self.tables.at(tap), self.row_index

    def attach(self, taps: Mapping[Tap, ResidualTap]) -> None:
        """Take note of the taps, which are told what a step does beyond adding."""
        self._taps = dict(taps)

    def summary(self) -> str:
        """For the log: what the tables take."""
        return f"steering with tables of {self.tables.num_bytes / 2**20:.1f} MiB"

    def update(
        self,
        finished: Iterable[str],
        new: Iterable[tuple[str, int]],
        step: SteeringStep | None,
    ) -> None:
        """Take over what the scheduler decided.

        Args:
            finished: ids of requests that have ended.
            new: id and prompt length, in tokens, of requests that have begun.
            step: changes of slots, if any.

        """
        for req_id in finished:
            self._prompt_lengths.pop(req_id, None)
            self._slots.pop(req_id, None)
        self._prompt_lengths.update(new)
        if step is None:
            return
        self._decoding = None
        for slot, tiers in step.loads:
            self.tables.load(slot, tiers)
        self._slots.update({req_id: use.slot for req_id, use in step.uses.items()})

    @property
    def is_idle(self) -> bool:
        """Whether nothing is set, neither for all nor for a request."""
        return self.tables.is_empty and not self._slots

    def plan_step(self, view: StepView) -> frozenset[int]:
        """Find the row of each token; the ops that must launch to add vectors."""
        if self.is_idle:
            return self._plan_nothing()
        if self._decoding is not None and self._decoding.goes_on(view):
            return self._launches
        self._unchanged = False
        self._decoding = None
        pairs = self._rows_of_requests(view.req_ids)
        lengths = [self._prompt_lengths.get(req_id, 0) for req_id in view.req_ids]
        filled = self.tables.filled_taps(set(chain.from_iterable(pairs)))
        self._rows = token_rows(pairs, lengths, view) if filled else None
        self._launches = self._ops_at(filled)
        self._plan_edits(view)
        if not self.tables.has_operations and view.only_decodes:
            of_prompts = any(map(lt, view.num_computed.tolist(), lengths))
            self._decoding = None if of_prompts else Decoding(view)
        return self._launches

    def _ops_at(self, taps: frozenset[Tap]) -> frozenset[int]:
        if self._last_ops[0] != taps:
            self._last_ops = taps, frozenset(self.addresses[tap] for tap in taps)
        return self._last_ops[1]

    def _plan_nothing(self) -> frozenset[int]:
        """A step that nothing steers, as most are: as little as can be."""
        self._rows = self._decoding = None
        self._unchanged = not self._written
        self._launches = frozenset()
        self.end_step()
        return self._launches

    @property
    def runs_eagerly(self) -> bool:
        """Whether the step does what neither compiled code nor a graph can do."""
        return bool(self._edited_taps)

    def _plan_edits(self, view: StepView) -> None:
        """Tell taps what they do beyond adding, which is nothing for most steps."""
        self.end_step()
        if not self.tables.has_operations:
            return
        device = self.row_index.device
        if self.tables.names_positions:
            view = view.settled()
        edits = plan_edits(view, self._tiers_of, self._prompt_lengths, self._taps)
        for tap, these in edits.items():
            self._taps[tap].edits = [row_edit(one, rows, device) for one, rows in these]
        self._edited_taps = set(edits)
        self.eager_steps.update({one.reason for at in edits.values() for one, _ in at})

    def _tiers_of(self, req_id: str) -> list[SteeringTiers]:
        """What steers a request: the engine's vectors, then its own."""
        slot = self._slots.get(req_id)
        own = [] if slot is None else [self.tables.loaded[slot]]
        return [self.tables.tiers, *own]

    def _rows_of_requests(self, req_ids: Sequence[str]) -> list[tuple[int, int]]:
        """Prefill and decode row of each request."""
        plain = ZERO_ROW, ZERO_ROW
        if not self.tables.is_empty:
            plain = GLOBAL_PREFILL_ROW, GLOBAL_DECODE_ROW
        return [
            plain if slot is None else (prefill_row(slot), decode_row(slot))
            for slot in map(self._slots.get, req_ids)
        ]

    def begin_step(self) -> None:
        """Write what the pass reads: a row for each token, none for padding."""
        if self._unchanged:
            return
        num_tokens = 0 if self._rows is None else len(self._rows)
        if self._written > num_tokens:
            self.row_index[num_tokens : self._written].fill_(ZERO_ROW)
        if self._rows is not None:
            async_tensor_h2d(self._rows, out=self.row_index[:num_tokens])
        self._written = num_tokens
        self._unchanged = True

    def end_step(self) -> None:
        """The pass is queued: what follows, a dummy batch perhaps, has other rows."""
        for tap in self._edited_taps:
            self._taps[tap].edits = None
        self._edited_taps = set()

    def stage_global(self, tiers: SteeringTiers) -> None:
        """Prepare a change of the global vectors: what can fail, fails here."""
        self._staged = tiers, self.tables.rows_with(tiers)

    def commit_global(self, keep: bool) -> None:
        """Carry the change out, or drop it because another rank failed."""
        staged, self._staged = self._staged, None
        if keep:
            assert staged is not None, "no change of the global vectors is staged"
            self._decoding = None
            self.tables.set_global(*staged)


def token_rows(
    rows: Sequence[tuple[int, int]], prompt_lengths: Sequence[int], view: StepView
) -> npt.NDArray[np.int32]:
    """The row of each token of a step `[num_tokens]`: positions decide the phase.

    Most steps have a token or two of most requests: Python's own loop takes less than
    NumPy's calls for them.

    Args:
        rows: prefill and decode row of each request.
        prompt_lengths: of each request, in tokens.
        view: the step.

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

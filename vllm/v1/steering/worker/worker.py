# SPDX-License-Identifier: Apache-2.0
"""Steering in one worker process, as the runner's adapter calls it."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from operator import lt
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from vllm.logger import init_logger
from vllm.v1.residual.plugin_errors import described
from vllm.v1.residual.steering_actions import Action
from vllm.v1.residual.step_layout import num_alternating
from vllm.v1.residual.step_view import Decoding, StepView
from vllm.v1.residual.tap import NO_SHAPES, Shapes, Tap
from vllm.v1.steering.conditions import MAX_CONDITIONS
from vllm.v1.steering.plan import NO_STEERING, SteeringTiers, pack, total
from vllm.v1.steering.slots import (
    GLOBAL_DECODE_ROW,
    GLOBAL_PREFILL_ROW,
    ZERO_ROW,
    SteeringStep,
    decode_row,
    prefill_row,
)
from vllm.v1.steering.worker.doses import Route, StepDoses
from vllm.v1.steering.worker.dynamic import DynamicSteering
from vllm.v1.steering.worker.features import SAEs
from vllm.v1.steering.worker.fired import FiredCounts
from vllm.v1.steering.worker.held_gates import HeldGates
from vllm.v1.steering.worker.matrix_programs import (
    Stretch,
    place_stretches,
    stretches_of,
)
from vllm.v1.steering.worker.phase import Phase, special_rows
from vllm.v1.steering.worker.programs import Programs
from vllm.v1.steering.worker.requests import RequestTokens, tokens_of
from vllm.v1.steering.worker.stages import StageGates
from vllm.v1.steering.worker.tables import (
    Rows,
    SteeringTables,
    TokenRows,
    token_rows,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

PADDING = 64
"""Extra rows for padding beyond the largest batch."""


class DecodePlan(NamedTuple):
    """The plan of a step that the next ones of its batch can use again."""

    decoding: Decoding
    vectors: npt.NDArray[np.int32] | None  # [T]
    """The row of the vector tables for each token; None if no token has any."""
    programs: npt.NDArray[np.int32] | None  # [T]
    """The row of the program index, likewise."""
    launches: frozenset[int]
    """The ops that must launch."""
    decides: bool
    """Whether it decides conditions."""


class WorkerSteering:
    """Loads tables and assigns a row to each token of a step.

    All methods are called on the engine's thread, in the same order on every rank.
    """

    def __init__(
        self,
        vllm_config: "VllmConfig",
        taps: Sequence[Tap],
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        saes: SAEs,
        doses: Route = Route.OUTPUT,
        shapes: Shapes = NO_SHAPES,
    ) -> None:
        """Allocate the tables.

        Args:
            vllm_config: the engine's configuration.
            taps: the hook points of this process.
            width: hidden size of the residual stream.
            dtype: of the residual stream.
            device: of the residual stream.
            saes: finds SAEs by name.
            doses: where the doses of requests with a receipt go.
            shapes: of hook points that differ from the stream.

        """
        config = vllm_config.steering_config
        acts = vllm_config.capture_config.takes_actions
        more = config.max_dynamic if acts else 0
        rows = config.num_rows + 2 * more
        graphs = vllm_config.compilation_config.max_cudagraph_capture_size or 0
        budget = vllm_config.scheduler_config.max_num_batched_tokens
        size = max(budget, graphs) + PADDING
        self.tables = SteeringTables(
            taps, rows, width, dtype, device, size, config.bank_bytes, saes, shapes
        )
        self._vectors_of = TokenRows(size, device)
        self._programs_of = TokenRows(size, device)
        self._slots: dict[str, int] = {}
        self._unloaded: dict[int, str] = {}
        """The slots that could not be loaded, with the reasons."""
        self._prompt_lengths: dict[str, int] = {}
        self._held = HeldGates(device, self.tables.fired)
        """Gate decisions that hold for later tokens."""
        self.doses = StepDoses(self.tables.doses, doses)
        """The doses of requests with a receipt."""
        self._stages = StageGates(device, self.tables.fired, self.doses)
        """What is exchanged with other pipeline stages."""
        self._launches: frozenset[int] = frozenset()
        self._decides = False
        """Whether the planned step decides conditions."""
        self._plans: deque[DecodePlan] = deque(maxlen=num_alternating(vllm_config))
        """Those of the last steps that the next may reuse."""
        self._plan: DecodePlan | None = None
        """The one that the pass reads, if it is one of them."""
        tables = {tap: self.tables.at(tap) for tap in taps}
        self.addresses = {
            tap: table.data_ptr() for tap, table in tables.items() if table is not None
        }
        """The identifier of each tap's op that adds vectors, as in `Launch`."""
        self.program_addresses = {
            tap: self.tables.programs.at(tap).data_ptr() for tap in taps
        }
        """The identifier of each tap's op that runs programs."""
        self._staged: tuple[SteeringTiers, Rows] | None = None
        self._tiers = NO_STEERING
        """The global vectors of the engine core, without those of consumers."""
        self._staged_tiers = NO_STEERING
        self.dynamic: DynamicSteering | None = None
        """What consumers set, if the configuration lets them."""
        if acts:
            slots = range(config.max_configs, config.max_configs + more)
            points = vllm_config.capture_config.has_hook_point
            self.dynamic = DynamicSteering(
                self.tables, points, width, slots, self._admitted
            )

    @property
    def row_index(self) -> torch.Tensor:
        """The row of the vector tables for each token."""
        return self._vectors_of.index

    @property
    def program_rows(self) -> torch.Tensor:
        """The row of the program index for each token."""
        return self._programs_of.index

    def tensors(self, tap: Tap) -> tuple[torch.Tensor | None, ...]:
        """The tensors that a tap reads.

        Returns:
            Table, rows, program index, its rows, and gates.

        """
        programs, table = self.tables.programs, self.tables.at(tap)
        return (
            table,
            None if table is None else self.row_index,
            programs.at(tap),
            self.program_rows,
            programs.gates,
        )

    def summary(self) -> str:
        """The memory of the tables, for the log."""
        return (
            f"steering with tables of {self.tables.num_bytes / 2**20:.1f} MiB, and "
            f"{self.tables.bank.num_bytes / 2**20:.1f} MiB for vectors of operations"
        )

    def update(
        self,
        finished: Iterable[str],
        new: Iterable[tuple[str, int]],
        step: SteeringStep | None,
    ) -> dict[str, str]:
        """Apply the scheduler's decisions.

        Args:
            finished: ids of finished requests.
            new: id and prompt length, in tokens, of newly scheduled requests.
            step: changes of slots, if any.

        Returns:
            The requests whose configuration could not be loaded, with the reasons.

        """
        if step is not None and step.actions:
            self.act(step.actions)  # They precede the ends of requests.
        finished = list(finished)
        self._held.forget(finished)
        if self.dynamic is not None:
            self.dynamic.forget(finished)
        for req_id in finished:
            self._prompt_lengths.pop(req_id, None)
            self._slots.pop(req_id, None)
        self._prompt_lengths.update(new)
        if step is None:
            return {}
        self._plans.clear()
        for slot, tiers in step.loads:
            self._load(slot, tiers)
        failed = {
            req_id: self._unloaded[slot]
            for req_id, slot in step.uses.items()
            if slot in self._unloaded
        }
        self._slots |= {r: slot for r, slot in step.uses.items() if r not in failed}
        return failed

    def _load(self, slot: int, tiers: SteeringTiers) -> None:
        """Load a slot; an error is that of the requests that use it."""
        self._unloaded.pop(slot, None)
        try:
            self.tables.load(slot, tiers)
        except Exception as error:
            logger.exception("A steering configuration could not be loaded")
            self._unloaded[slot] = f"steering could not be loaded: {described(error)}"
            self.tables.loaded.pop(slot, None)

    def steered(self, req_ids: Iterable[str]) -> list[str]:
        """Which of the requests steering may change: all, if global vectors are set."""
        own = () if self.dynamic is None else self.dynamic.of_request
        everybody = not self.tables.is_empty
        return [r for r in req_ids if everybody or r in self._slots or r in own]

    @property
    def is_idle(self) -> bool:
        """Whether nothing is set, neither globally nor for a request."""
        acts = self.dynamic is not None and self.dynamic.of_request
        return self.tables.is_empty and not self._slots and not acts

    def plan_step(self, view: StepView) -> frozenset[int]:
        """Assign a row to each token; returns the ops that must launch."""
        if self.is_idle:
            return self.plan_nothing()
        for plan in self._plans:
            if plan.decoding.continues(view):
                return self._repeated(plan)
        self.plan_nothing()
        pairs = self._rows_of_requests(view.req_ids)
        lengths = [self._prompt_lengths.get(req_id, 0) for req_id in view.req_ids]
        used, known = set(chain.from_iterable(pairs)), self.tables.phases
        phases = {row: known[row] for row in used if row in known}
        filled = self.tables.filled_taps(used)
        lasts = True
        if filled or phases:
            rows = token_rows(pairs, lengths, view)
            if filled:
                self._vectors_of.plan(rows)
                self._launches = frozenset(map(self.addresses.__getitem__, filled))
            if phases:
                lasts = self._plan_phases(phases, view, pairs, lengths, rows)
        if lasts and view.only_decodes:
            of_prompts = any(map(lt, view.num_computed.tolist(), lengths))
            if not of_prompts:
                self._plan = DecodePlan(
                    Decoding(view),
                    self._vectors_of.rows,
                    self._programs_of.rows,
                    self._launches,
                    self._decides,
                )
                self._plans.append(self._plan)
        return self._launches

    def _repeated(self, plan: "DecodePlan") -> frozenset[int]:
        """Use a plan again, which another batch's may have replaced."""
        if plan is not self._plan:
            self.plan_nothing()
            self._plan = plan
            self._vectors_of.plan(plan.vectors)
            self._programs_of.plan(plan.programs)
            self._launches, self._decides = plan.launches, plan.decides
        return self._launches

    def _plan_phases(
        self,
        phases: Mapping[int, Phase],
        view: StepView,
        pairs: Sequence[tuple[int, int]],
        lengths: Sequence[int],
        rows: npt.NDArray[np.int32],
    ) -> bool:
        """Plan what tables do not do; whether the plan holds for the next tokens too.

        Args:
            phases: those that the step uses, by table row.
            view: of the step.
            pairs: table rows of each request.
            lengths: prompt length of each request, in tokens.
            rows: `[T]`, the table row of each token.

        """
        self._plan_programs(view, pairs, lengths, rows)
        requests = tokens_of(view, pairs, lengths)
        self._held.plan(requests, phases)
        self.doses.plan(requests, phases)
        crossings = {r: p.crossing for r, p in phases.items() if p.crossing.is_used}
        if crossings:
            self._stages.plan(rows, crossings)
        self._decides = any(phase.decides for phase in phases.values())
        again = self._held.is_used or self.doses.is_used or crossings
        return not again and not any(map(self._acts_later, requests))

    def plan_nothing(self) -> frozenset[int]:
        """Plan a step without steering, the usual case, at the least cost."""
        self._held.plan_nothing()
        self._stages.plan_nothing()
        self.doses.plan_nothing()
        self._decides = False
        self._vectors_of.plan(None)
        self._programs_of.plan(None)
        self._plan = None
        self._launches = frozenset()
        return self._launches

    def _plan_programs(
        self,
        view: StepView,
        pairs: Sequence[tuple[int, int]],
        lengths: Sequence[int],
        rows: npt.NDArray[np.int32],
    ) -> None:
        """Assign programs to tokens: those of the token's row, or of its position."""
        index = self.tables.programs
        special: list[Programs] = []
        if any(one.positioned for one in self.tables.phases.values()):
            rows = rows.copy()
            settled = tokens_of(view.settled(), pairs, lengths)
            special = self._at_positions(settled, rows)
            index.write_special(special)
        self._programs_of.plan(rows)
        used = np.unique(rows).tolist()
        at_taps = {row: index.of_row(row) for row in used}
        taps = frozenset(chain.from_iterable(at_taps.values()))
        self._launches |= {self.program_addresses[tap] for tap in taps}

    def _at_positions(
        self,
        requests: Iterable[RequestTokens],
        rows: npt.NDArray[np.int32],  # [num_tokens], changed in place
    ) -> list[Programs]:
        """Assign separate rows to tokens on which operations with positions act."""
        known: dict[tuple[int, frozenset[int]], int] = {}
        special: list[Programs] = []
        stretches: list[Stretch] = []
        """Tokens with one matrix row each; their programs come after the others."""
        of_stretch: list[tuple[npt.NDArray[np.intp], int]] = []
        first_special = self.tables.programs.first_special
        for request in requests:
            length, offset = request.length, request.offset
            for row, first, last in request.parts:
                phase = self.tables.phases.get(row)
                if phase is None or not phase.positioned:
                    continue
                sets, which = special_rows(phase, length, first, last)
                for index, active in enumerate(sets):
                    tokens = np.flatnonzero(which == index)
                    if active & phase.by_row:
                        for part in stretches_of(tokens):
                            position, token = first + part[0], first + offset + part[0]
                            one = Stretch(phase, active, length, position, token)
                            of_stretch.append((part + first + offset, len(stretches)))
                            stretches.append(one)
                        continue
                    if (row, active) not in known:
                        known[row, active] = first_special + len(special)
                        special.append(phase.at_positions(active))
                    rows[tokens + first + offset] = known[row, active]
        for tokens, index in of_stretch:
            rows[tokens] = first_special + len(special) + index
        return special + place_stretches(stretches, self.row_index.device)

    def _acts_later(self, one: RequestTokens) -> bool:
        """Whether an operation has a position in this step or in a later one."""
        phase = self.tables.phases.get(one.rows[1])
        if phase is None or not phase.positioned:
            return False
        return phase.last_position(one.length) >= one.start

    def _rows_of_requests(self, req_ids: Sequence[str]) -> list[tuple[int, int]]:
        """Prefill and decode row of each request."""
        plain = ZERO_ROW, ZERO_ROW
        if not self.tables.is_empty:
            plain = GLOBAL_PREFILL_ROW, GLOBAL_DECODE_ROW
        pairs = [
            plain if slot is None else (prefill_row(slot), decode_row(slot))
            for slot in map(self._slots.get, req_ids)
        ]
        if self.dynamic is None or not self.dynamic.of_request:
            return pairs
        overrides = map(self.dynamic.of_request.get, req_ids)
        return [
            pair if slot is None else (pair[0], decode_row(slot))
            for pair, slot in zip(pairs, overrides, strict=True)
        ]

    def begin_step(self) -> None:
        """Write what the pass reads: the rows of tokens, and zero rows for padding."""
        self._vectors_of.write()
        self._programs_of.write()
        self._held.load(self.tables.programs.gates)
        self._stages.load(self.tables.programs.gates)
        self.doses.begin()

    def end_step(self) -> None:
        """End a step after its pass is queued; a dummy batch may follow."""
        self._held.save(self.tables.programs.gates)
        self.doses.end()
        if self._some_stage_decides:
            self.tables.fired.send()

    @property
    def _some_stage_decides(self) -> bool:
        """Whether the step decides conditions, here or in an earlier stage."""
        return self._decides or self._stages.has_counts

    def take_fired(self) -> FiredCounts | None:
        """The counts of conditions, if the last step has decided some."""
        return self.tables.fired if self._some_stage_decides else None

    def receive(self, tensors: dict[str, Any], wait: Callable[[], None]) -> None:
        """Note what the previous pipeline stage has sent with a step.

        Args:
            tensors: the step's intermediate tensors, which may still arrive.
            wait: returns when they have.

        """
        self._stages.receive(tensors, wait)

    def send(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """A step's intermediate tensors, with what later stages need."""
        gates = self.tables.programs.gates
        return self._stages.send(tensors, gates, self._decides)

    def stage_global(self, tiers: SteeringTiers) -> None:
        """Prepare a change of the global vectors: what can fail, fails here."""
        self._staged_tiers = tiers
        tiers = self._with_dynamic(tiers)
        self._staged = tiers, self.tables.rows_with(tiers)

    def commit_global(self, keep: bool) -> None:
        """Apply the staged change, or drop it because another rank failed."""
        staged, self._staged = self._staged, None
        if keep:
            assert staged is not None, "no change of the global vectors is staged"
            self._plans.clear()
            if staged[0].conditions != self.tables.tiers.conditions:
                self._held.forget_engines()
            self._tiers = self._staged_tiers
            self.tables.set_global(*staged)

    def act(self, actions: Iterable[Action]) -> None:
        """Carry out what consumers want, from the next step on.

        Args:
            actions: as `DynamicSteering.taken` returns them, equal on all ranks.

        """
        assert self.dynamic is not None, "consumers cannot steer here"
        before = self.dynamic.tier
        if not self.dynamic.apply(actions):
            return
        self._plans.clear()
        try:
            tiers = self._with_dynamic(self._tiers)
            if tiers.digest != self.tables.tiers.digest:
                self.tables.set_global(tiers, self.tables.rows_with(tiers))
        except Exception as error:
            self.dynamic.tier = before
            self.dynamic.reject(actions, error)

    def _with_dynamic(self, tiers: SteeringTiers) -> SteeringTiers:
        """The global vectors with those that consumers set for generated tokens."""
        own = None if self.dynamic is None else self.dynamic.tier.packed()
        if own is None:
            return tiers
        decode = tiers.decode
        operations = () if decode is None else decode.operations
        packed = pack(total([decode, own]), (*operations, *own.operations))
        joined = SteeringTiers(tiers.base, tiers.prefill, packed)
        if len(joined.conditions) > MAX_CONDITIONS:
            raise ValueError(
                f"the global vectors and the monitor have more than {MAX_CONDITIONS} "
                "distinct conditions"
            )
        return joined

    def _admitted(self, req_id: str) -> SteeringTiers:
        """What a running request asked for."""
        if req_id not in self._prompt_lengths:
            raise KeyError(f"no request {req_id!r} is running")
        slot = self._slots.get(req_id)
        return NO_STEERING if slot is None else self.tables.loaded[slot]

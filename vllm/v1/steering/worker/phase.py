# SPDX-License-Identifier: Apache-2.0
"""Compiles a phase of a configuration to programs, which hook points execute.

A phase (a configuration's prompt tokens or its generated ones) has a program at each
hook point at which it has operations. Plain additions of the phase at such a hook point
are part of the program, so that the order of operations is kept. Operations with
positions make further programs, for the tokens on which they act.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from vllm.model_executor.layers.residual.program import (
    NO_GATE,
    Flag,
    Instruction,
    Kind,
    Program,
)
from vllm.v1.residual.receipts import Effect
from vllm.v1.residual.spans import Spans, absolute, last_of
from vllm.v1.residual.tap import Tap
from vllm.v1.steering.plan import Operation, Vector, place_of
from vllm.v1.steering.worker.bank import Bank, Kept, draft_sum, uploaded
from vllm.v1.steering.worker.dose_memory import DoseMemory, measured_effects
from vllm.v1.steering.worker.features import together
from vllm.v1.steering.worker.fired import FiredCounts
from vllm.v1.steering.worker.gates import (
    Deciding,
    Gate,
    Reader,
    draft_probe,
    in_columns,
)
from vllm.v1.steering.worker.programs import Programs, place
from vllm.v1.steering.worker.stages import crossing_of

if TYPE_CHECKING:
    from vllm.v1.steering.worker.matrix_programs import Template

LAST = ("feature", "clamp")
"""Operations that come after all others, in this order."""


def _read_by(gate: Gate | None) -> frozenset[Tap]:
    """The tap of the gate's probe, if the same tokens decide and use the gate."""
    if gate is None or gate.condition.scope == "prompt":
        return frozenset()
    return frozenset({gate.condition.tap})


def _carried_from(one: Operation) -> frozenset[Tap]:
    """The tap from which an operation needs a transcoder's activation."""
    use = one.details.feature
    if use is None or use.reads is None or not use.carries:
        return frozenset()
    return frozenset({use.reads})


def _is_latched(gate: Gate | None) -> bool:
    return gate is not None and gate.condition.scope == "rest"


class Phase:
    """The operations of one phase of a configuration, as programs."""

    def __init__(
        self,
        readers: Iterable[Reader],
        deciding: Sequence[Gate],
        added: Mapping[Tap, Vector],
        taps: Collection[Tap],
        bank: Bank,
        fired: FiredCounts,
        values: torch.Tensor,
        memory: DoseMemory | None,
    ) -> None:
        """Compile the phase and place it on the device.

        Args:
            readers: all operations of the phase, the engine's before a request's.
            deciding: gates for later tokens that this phase decides.
            added: the vectors added at each token, by hook point of any stage.
            taps: the hook points of this process.
            bank: the store of operations' vectors.
            fired: counts the tokens at which conditions fire.
            values: `[tokens, GATE_COLUMNS]`, the gates of the step's tokens, on the
                device.
            memory: for the doses of its tokens; None if they are not measured.

        """
        self._values = values
        self._fired = fired
        every = sorted(readers, key=lambda each: place_of(each[0]))
        self.crossing = crossing_of(every, taps)
        """What is exchanged with other pipeline stages."""
        self._here = frozenset(taps)
        self._places = [
            n for n, (one, gate, _) in enumerate(every) if self._concerns(one, gate)
        ]
        """The place of each operation among those of all stages."""
        here = [every[place] for place in self._places]
        self.operations = [one for one, _, _ in here]
        """The operations that act or read in this stage, numbered from 0."""
        self._acting = [n for n, one in enumerate(self.operations) if one.tap in taps]
        self._gates = [gate for _, gate, _ in here]
        self._decided_here = [gate for gate in self._gates if self._reads(gate)]
        self._columns = [column for _, _, column in here]
        self._deciding = [one for one in deciding if self._reads(one)]
        self.taps = frozenset(self.taps_of(range(len(here)))).union(
            gate.condition.tap for gate in self._deciding
        )
        """Taps at which programs also perform the plain additions."""
        self.device = values.device
        self._kept = self._fetched(bank)
        self._instructions = {n: self._kept[n].instruction for n in self._acting}
        summed = self.taps if memory is None else self._here
        self._probes, self._sums = self._uploaded(added, summed)
        self.effects: tuple[Effect, ...] = ()
        """What all stages measure at each token, if anything is measured."""
        self._measure(memory, every, deciding, list(added))
        self.positioned = _by_positions(self.operations)
        """By positions, the numbers of the operations that act there only."""
        self.by_row = frozenset(n for n in self._acting if self.operations[n].num_rows)
        """The numbers of operations with one row per position."""
        self.deciding = self._decided(self._deciding)
        """The gates that the prompt decides for later tokens."""
        decided = in_columns(self._decided_here)
        held = [gate for gate in decided if gate.condition.scope != "token"]
        self.held = tuple(gate.column for gate in held)
        """Gate columns that hold decisions of earlier tokens."""
        in_prompt = [gate for gate in held if gate.condition.in_prompt]
        self.latched = tuple(
            gate.column
            for gate in held
            if _is_latched(gate) and not gate.condition.in_prompt
        )
        """The held columns that a generated token opens for all later ones."""
        self.spreading = self._decided(in_prompt)
        """The gates that any token opens for later ones, also of the same step."""
        self.fixed = self._placed(self.taps.union(self._sums), frozenset())
        """The programs of tokens on which no operation with positions acts."""
        self._special: dict[frozenset[int], Programs] = {}
        self.templates: dict[frozenset[int], Template] = {}
        """Program templates for operations with one row per position."""

    def _fetched(self, bank: Bank) -> dict[int, Kept]:
        """The instructions of the operations that act or carry here, by number."""
        needed = [
            number
            for number, one in enumerate(self.operations)
            if one.tap in self._here or _carried_from(one) & self._here
        ]
        kept = bank.fetch([self.operations[number] for number in needed])
        return dict(zip(needed, kept, strict=True))

    def _uploaded(
        self, added: Mapping[Tap, Vector], summed: Collection[Tap]
    ) -> tuple[dict[Gate, Instruction], dict[Tap, Instruction]]:
        """Upload the probes of gates, and the additions at the hook points `summed`."""
        gates = in_columns([*self._decided_here, *self._deciding])
        taps = [tap for tap in added if tap in summed]
        probes = [draft_probe(gate, self._fired) for gate in gates]
        sums = [draft_sum(added[tap]) for tap in taps]
        made = uploaded([*probes, *sums], self.device)
        count = len(probes)
        return (
            dict(zip(gates, made[:count], strict=True)),
            dict(zip(taps, made[count:], strict=True)),
        )

    def _decided(self, gates: Iterable[Gate]) -> tuple[Deciding, ...]:
        return tuple(
            Deciding(gate, self._fired.place(gate.condition), self._probes[gate].doses)
            for gate in gates
        )

    def _concerns(self, one: Operation, gate: Gate | None) -> bool:
        """Whether an operation acts in this stage, or what it needs is read here."""
        reads = _carried_from(one) & self._here
        return one.tap in self._here or self._reads(gate) or bool(reads)

    def _reads(self, gate: Gate | None) -> bool:
        """Whether the gate's probe reads in this stage."""
        return gate is not None and gate.condition.tap in self._here

    @property
    def decides(self) -> bool:
        """Whether conditions are decided at some of its tokens."""
        return bool(self._probes)

    @property
    def is_empty(self) -> bool:
        """Whether no token passes a program, and nothing is passed on."""
        return not self.taps and not self.effects and not self.crossing.is_used

    def _measure(
        self,
        memory: DoseMemory | None,
        every: Sequence[Reader],
        deciding: Sequence[Gate],
        added: Sequence[Tap],
    ) -> None:
        """Assign columns of doses to what is measured, in this stage or in another.

        All stages have the same columns, and this one fills those of its own
        instructions.
        """
        if memory is None:
            return
        gates = in_columns([*(gate for _, gate, _ in every), *deciding])
        self.effects, places = measured_effects(gates, added, every)
        if not self.effects:
            return
        columns = memory.columns(len(self.effects))
        self._probes = {
            gate: replace(one, doses=columns[gates.index(gate)])
            for gate, one in self._probes.items()
        }
        self._sums = {
            tap: replace(
                one,
                kind=one.kind if tap in self.taps else Kind.MEASURE,
                doses=columns[len(gates) + added.index(tap)],
            )
            for tap, one in self._sums.items()
        }
        self._instructions = {
            number: replace(one, doses=columns[places[self._places[number]]])
            for number, one in self._instructions.items()
        }

    def at_positions(self, active: frozenset[int]) -> Programs:
        """The programs of tokens on which these operations with positions act.

        Operations with one row per position are handled in `matrix_programs.py`.
        """
        if active not in self._special:
            self._special[active] = self.fixed | self._placed(
                self.taps_of(active), active
            )
        return self._special[active]

    def taps_of(self, numbers: Collection[int]) -> set[Tap]:
        """Taps of this stage where these operations act, or what they need is read."""
        acts = {self.operations[number].tap for number in numbers}
        found = acts.union(
            *(_read_by(self._gates[number]) for number in numbers),
            *(_carried_from(self.operations[number]) for number in numbers),
        )
        return found & self._here

    def last_position(self, prompt_length: int) -> int:
        """The last position on which an operation with positions acts."""
        return max(last_of(spans, prompt_length) for spans in self.positioned)

    def _placed(self, taps: Collection[Tap], active: frozenset[int]) -> Programs:
        programs: dict[Tap, Program] = {
            tap: tuple(made for _, made in numbered)
            for tap in sorted(taps)
            if (numbered := self.numbered(tap, active))
        }
        return place(programs, self.device)

    def numbered(
        self, tap: Tap, active: frozenset[int]
    ) -> list[tuple[int, Instruction]]:
        """The instructions of a hook point, in order, with their operations' numbers.

        Probes come first: they see the stream as a capture at this point does. The norm
        is saved before the first addition if an operation needs it. Probes and plain
        additions belong to no operation and have the number -1.
        """
        numbers = [
            number
            for number, one in enumerate(self.operations)
            if one.positions is None or number in active
        ]
        probes = [
            (-1, self._probes[gate])
            for gate in in_columns(
                [
                    *(self._gates[number] for number in numbers),
                    *(gate for gate in self._decided_here if _is_latched(gate)),
                    *self._deciding,
                ]
            )
            if gate.condition.tap == tap and self._decides(gate)
        ]
        acting = [
            (number, self._instruction(number))
            for number in numbers
            if self.operations[number].tap == tap
        ]
        kinds = [self.operations[number].op for number, _ in acting]
        replaces = [a for a, op in zip(acting, kinds, strict=True) if op == "replace"]
        adds = [(-1, self._sums[tap])] if tap in self._sums else []
        adds += [a for a, op in zip(acting, kinds, strict=True) if op == "add"]
        if any(made.c1 for _, made in adds):
            number, first = adds[0]
            adds[0] = number, replace(first, flags=first.flags | Flag.SAVE_NORM)
        others = list(zip(acting, kinds, strict=True))
        before = [a for a, op in others if op not in ("replace", "add", *LAST)]
        features = [(self._sae_of(a[0]), a) for a, op in others if op == "feature"]
        clamps = [a for a, op in others if op == "clamp"]
        acts = [*probes, *replaces, *adds, *before, *together(features), *clamps]
        return [*acts, *self._carried(tap, numbers)]

    def _carried(
        self, tap: Tap, numbers: Iterable[int]
    ) -> Iterator[tuple[int, Instruction]]:
        """What transcoders read at a hook point, after everything that acts there."""
        for number in numbers:
            if tap not in _carried_from(self.operations[number]):
                continue
            made = self._kept[number].carried
            assert made is not None, "the operation needs an activation"
            column = self._columns[number]
            if made.kind == Kind.PROBE:
                yield -1, replace(made, gate=column)
            else:
                yield -1, replace(made, doses=self._values[:, column])

    def _sae_of(self, number: int) -> str:
        use = self.operations[number].details.feature
        assert use is not None
        return use.sae

    def _decides(self, gate: Gate) -> bool:
        """Whether this phase decides the gate."""
        return gate.condition.scope != "prompt" or gate in self._deciding

    def _instruction(self, number: int) -> Instruction:
        made, gate = self._instructions[number], self._gates[number]
        if self._columns[number] != NO_GATE:
            made = replace(made, stored=self._columns[number])
        if gate is None:
            return made
        latch = Flag.LATCH if gate.condition.in_prompt else Flag.NONE
        return replace(made, gate=gate.column, flags=made.flags | latch)


def _by_positions(operations: Sequence[Operation]) -> dict[Spans, frozenset[int]]:
    found: dict[Spans, list[int]] = {}
    for number, one in enumerate(operations):
        if one.positions is not None:
            found.setdefault(one.positions, []).append(number)
    return {spans: frozenset(numbers) for spans, numbers in found.items()}


def special_rows(
    phase: Phase, prompt_length: int, start: int, stop: int
) -> tuple[list[frozenset[int]], npt.NDArray[np.intp]]:
    """Find which operations with positions act on the tokens at `[start, stop)`.

    Returns:
        The distinct, nonempty sets of operation numbers, and for each token the index
        of its set `[stop - start]`, -1 if none acts.

    """
    acts = np.zeros((stop - start, len(phase.positioned)), dtype=bool)
    for column, spans in enumerate(phase.positioned):
        for places in absolute(spans, prompt_length, start, stop):
            acts[places.start - start : places.stop - start, column] = True
    found = np.full(stop - start, -1, dtype=np.intp)
    anywhere = np.flatnonzero(acts.any(axis=1))
    if not len(anywhere):
        return [], found
    numbers = list(phase.positioned.values())
    if len(numbers) == 1:  # As in each cell of a patching sweep.
        found[anywhere] = 0
        return numbers, found
    distinct, which = np.unique(acts[anywhere], axis=0, return_inverse=True)
    found[anywhere] = which.reshape(-1)
    some = ([numbers[column] for column in np.flatnonzero(row)] for row in distinct)
    return [frozenset(chain.from_iterable(one)) for one in some], found

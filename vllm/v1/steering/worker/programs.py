# SPDX-License-Identifier: Apache-2.0
"""Compiles operations to programs, which the ops of hook points execute.

A phase of a configuration (its prompt tokens or its generated ones) has a program at
each hook point at which it has operations. Plain additions of the phase at such a hook
point are part of the program, so that the order of operations is kept. Operations with
positions make further programs, for the tokens on which they act.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
import torch

from vllm.model_executor.layers.residual.capture_op import ALIGNMENT
from vllm.model_executor.layers.residual.program import (
    GATE_COLUMNS,
    NO_GATE,
    Activation,
    Flag,
    Instruction,
    Kind,
    Program,
    words_of,
)
from vllm.model_executor.layers.residual.program_host import reads_tables
from vllm.utils.math_utils import round_up
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.steering.operations import Operation, place_of
from vllm.v1.steering.plan import Tap, Vector
from vllm.v1.steering.positions import Spans
from vllm.v1.steering.receipts import Effect, effect_of
from vllm.v1.steering.worker.dose_memory import DoseMemory, measured_effects
from vllm.v1.steering.worker.features import (
    SAEs,
    carried_instruction,
    feature_instruction,
    together,
)
from vllm.v1.steering.worker.fired import FiredCounts
from vllm.v1.steering.worker.gates import (
    Deciding,
    Gate,
    column_of,
    in_columns,
    probe_of,
)
from vllm.v1.steering.worker.stages import crossing_of

if TYPE_CHECKING:
    from vllm.v1.steering.worker.moving import Template

LAST = ("feature", "clamp")
"""Operations that come after all others, in this order."""
FIRST_ROW = 0
"""Placeholder for the row offset of instructions with one row per position."""


class Placed(NamedTuple):
    """A program and its place on the device."""

    program: Program
    address: int
    """The device address; 0 where no kernel reads it."""
    storage: torch.Tensor | None
    """Owns the memory at the address."""


Programs = dict[Tap, Placed]
"""The programs that a token passes, by hook point."""


class _Vectors:
    """The distinct vectors of a phase, uploaded in one copy."""

    def __init__(self, width: int) -> None:
        self.width = width
        self._numbers: dict[bytes, int] = {}
        self._rows: list[npt.NDArray[np.float32]] = []  # [rows, H] each
        self._count = 0

    def add(self, vector: Vector) -> int:
        """Add a vector `[H]`; returns its row in the upload."""
        data = vector.tobytes()
        if data not in self._numbers:
            self._numbers[data] = self.add_rows(vector[None])
        return self._numbers[data]

    def add_rows(self, rows: npt.NDArray[np.float32]) -> int:
        """Add several rows `[n, H]`, which stay contiguous; returns the first's row."""
        first = self._count
        self._rows.append(rows)
        self._count += len(rows)
        return first

    def upload(self, device: torch.device) -> torch.Tensor:
        """Upload all vectors, float32 `[vectors, H]`."""
        if not self._rows:
            return torch.empty(0, 0, device=device)
        return async_tensor_h2d(np.concatenate(self._rows), device, torch.float32)


Draft = Callable[[torch.Tensor], Instruction]
"""Makes an instruction from the uploaded vectors."""


def _unit(vectors: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Vectors `[..., H]` normalized to length 1, in double precision."""
    wide = vectors.astype(np.float64)
    norms = np.linalg.norm(wide, axis=-1, keepdims=True)
    return (wide / norms).astype(np.float32)


def _draft_sum(vector: Vector, vectors: _Vectors) -> Draft:
    """Draft the addition of a vector as given."""
    at = vectors.add(vector)
    return lambda table: Instruction(Kind.LINEAR, table[at : at + 1], c0=1.0)


def _draft(one: Operation, vectors: _Vectors) -> Draft:
    """Draft the instruction of an operation."""
    if one.op in _OTHERS:
        return _OTHERS[one.op](one, vectors)
    directed = one.norm_match or one.op in ("project_out", "clamp")
    rows = one.vector.reshape(-1, vectors.width)
    rows = _unit(rows) if directed else rows
    mask = one.details.array("mask")
    masked = None if mask is None else vectors.add(mask)
    at = vectors.add_rows(rows) if one.num_rows else vectors.add(rows[0])
    stop = at + len(rows)
    offset = FIRST_ROW if one.num_rows else None
    low = -np.inf if one.low is None else one.low
    high = np.inf if one.high is None else one.high
    plain, matched = (0.0, one.scale) if one.norm_match else (one.scale, 0.0)

    def make(table: torch.Tensor) -> Instruction:
        read = table[at:stop]
        if one.op == "project_out":
            return Instruction(
                Kind.LINEAR, read, flags=Flag.DOT, c2=-one.scale, offset=offset
            )
        if one.op == "clamp":
            return Instruction(
                Kind.LINEAR,
                read,
                flags=Flag.DOT,
                c3=one.details.strength,
                low=low,
                high=high,
                offset=offset,
            )
        if one.op == "replace":
            return Instruction(
                Kind.REPLACE,
                read,
                flags=Flag.SAVE_NORM if one.norm_match else Flag.NONE,
                c0=plain,
                c1=matched,
                alpha=one.details.alpha,
                mask=None if masked is None else table[masked],
                offset=offset,
            )
        return Instruction(Kind.LINEAR, read, c0=plain, c1=matched, offset=offset)

    return make


def _draft_swap(one: Operation, vectors: _Vectors) -> Draft:
    target = one.details.array("target")
    assert target is not None
    read, wanted = _unit(one.vector), _unit(target)
    at, to = vectors.add(read), vectors.add(wanted - read)
    return lambda table: Instruction(
        Kind.LINEAR,
        table[at : at + 1],
        write=table[to : to + 1],
        flags=Flag.DOT,
        c2=1.0,
    )


def _draft_rotate(one: Operation, vectors: _Vectors) -> Draft:
    first, second = one.vector.reshape(2, -1)
    at, to = vectors.add(first), vectors.add(second)
    angle = np.deg2rad(one.details.degrees)
    return lambda table: Instruction(
        Kind.ROTATE,
        table[at : at + 1],
        write=table[to : to + 1],
        c0=float(np.cos(angle)),
        c1=float(np.sin(angle)),
    )


def _draft_low_rank(one: Operation, vectors: _Vectors) -> Draft:
    details = one.details
    write = details.array("write")
    assert write is not None
    bias, threshold = details.array("bias"), details.array("threshold")
    width = vectors.width
    at = vectors.add_rows(one.vector.reshape(-1, width))
    to = vectors.add_rows(write.reshape(-1, width))
    rank = len(write) // width

    def make(table: torch.Tensor) -> Instruction:
        def numbers(found: Vector | None) -> torch.Tensor | None:
            if found is None:
                return None
            return async_tensor_h2d(found.copy(), table.device, torch.float32)

        return Instruction(
            Kind.LOW_RANK,
            table[at : at + rank],
            write=table[to : to + rank],
            c1=one.scale,
            low=-np.inf if one.low is None else one.low,
            high=np.inf if one.high is None else one.high,
            activation=Activation[details.activation.upper()],
            bias=numbers(bias),
            threshold=numbers(threshold),
        )

    return make


_OTHERS: dict[str, Callable[[Operation, _Vectors], Draft]] = {
    "swap": _draft_swap,
    "rotate": _draft_rotate,
    "low_rank": _draft_low_rank,
}


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


class Kept:
    """An instruction and its vectors on the device, alive while a phase uses it."""

    __slots__ = ("__weakref__", "carried", "instruction")

    def __init__(
        self, instruction: Instruction, carried: Instruction | None = None
    ) -> None:
        self.instruction = instruction
        self.carried = carried
        """Stores the value that the instruction needs from an earlier hook point."""


class Bank:
    """The vectors of operations on the device, without duplicates.

    Both phases of a configuration share its base operations, and all configurations
    share the engine's. Memory of the configured size is reserved while the engine
    measures how much is free.
    """

    def __init__(
        self,
        width: int,
        device: torch.device,
        num_bytes: int = 0,
        saes: SAEs | None = None,
    ) -> None:
        self._width = width
        self._saes = saes
        self._device = device
        self._kept: WeakValueDictionary[str, Kept] = WeakValueDictionary()
        self._reserved: torch.Tensor | None = torch.empty(
            num_bytes, dtype=torch.uint8, device=device
        )
        self.num_bytes = num_bytes
        """Bytes that the vectors may take, part of the model's memory."""

    def fetch(self, operations: Sequence[Operation]) -> list[Kept]:
        """The operations' instructions; missing vectors are uploaded in one copy."""
        self._reserved = None  # The vectors use the reserved memory.
        vectors = _Vectors(self._width)
        found = {one.digest: self._kept.get(one.digest) for one in operations}
        missing = {one.digest: one for one in operations if found[one.digest] is None}
        drafts = {
            digest: self._drafted(one, vectors) for digest, one in missing.items()
        }
        table = vectors.upload(self._device)
        made = {
            digest: Kept(draft(table), self._carried(missing[digest]))
            for digest, draft in drafts.items()
        }
        self._kept.update(made)
        return [found[one.digest] or made[one.digest] for one in operations]

    def _drafted(self, one: Operation, vectors: _Vectors) -> Draft:
        if one.details.feature is None:
            return _draft(one, vectors)
        assert self._saes is not None, "admission has checked the SAEs"
        made = feature_instruction(one, self._saes)
        return lambda table: made

    def _carried(self, one: Operation) -> Instruction | None:
        return None if self._saes is None else carried_instruction(one, self._saes)


class Together(NamedTuple):
    """Operations of a phase that act at the same positions, by number."""

    first: Operation
    numbers: tuple[int, ...]


class Phase:
    """The operations of one phase of a configuration, as programs."""

    def __init__(
        self,
        operations: Sequence[Operation],
        added: Mapping[Tap, Vector],
        taps: Collection[Tap],
        width: int,
        device: torch.device,
        bank: Bank | None = None,
        gates: Sequence[Gate | None] = (),
        columns: Sequence[int] = (),
        deciding: Sequence[Gate] = (),
        memory: DoseMemory | None = None,
        fired: FiredCounts | None = None,
    ) -> None:
        """Compile the phase and place it on the device.

        Args:
            operations: all operations of the phase, the engine's before a request's.
            added: the vectors added at each token, by hook point.
            taps: the hook points of this process.
            width: hidden size of the residual stream.
            device: device of the residual stream.
            bank: the store of operations' vectors; None for a private one.
            gates: the gate of each operation, or None; empty if none has one.
            columns: the column of the transcoder's activation that each operation
                uses, or `NO_GATE`; empty if none uses one.
            deciding: gates for later tokens that this phase decides.
            memory: for the doses of its tokens; None if they are not measured.
            fired: counts the tokens at which conditions fire; None to count none.

        """
        count = len(operations)
        found = zip(
            operations,
            gates or [None] * count,
            columns or [NO_GATE] * count,
            strict=True,
        )
        every = sorted(found, key=lambda each: place_of(each[0]))
        self.crossing = crossing_of(every, taps)
        """What is exchanged with other pipeline stages."""
        self._here = frozenset(taps)
        here = [each for each in every if self._concerns(each[0], each[1])]
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
        self.device = device
        self._kept = self._fetched(bank or Bank(width, device))
        self._instructions = {n: self._kept[n].instruction for n in self._acting}
        if memory is None:
            added = {tap: one for tap, one in added.items() if tap in self.taps}
        self._probes, self._sums = self._uploaded(added, width, fired)
        self.effects: tuple[Effect, ...] = ()
        """What is measured at each token, if anything is."""
        self.doses = torch.empty(0, 0)
        """The doses, float32 `[tokens, >= len(effects)]`, if anything is measured."""
        self._measure(memory)
        self.positioned = _together(self.operations)
        """Operations with positions, grouped by equal ones."""
        self.by_row = frozenset(n for n in self._acting if self.operations[n].num_rows)
        """The numbers of operations with one row per position."""
        self.deciding = self._decided(self._deciding, fired)
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
        self.spreading = self._decided(in_prompt, fired)
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
        self, added: Mapping[Tap, Vector], width: int, fired: FiredCounts | None
    ) -> tuple[dict[Gate, Instruction], dict[Tap, Instruction]]:
        """The probes of gates, and the additions, whose vectors this uploads."""
        vectors = _Vectors(width)
        probes = {
            gate: vectors.add(gate.condition.vector)
            for gate in in_columns([*self._decided_here, *self._deciding])
        }
        sums = {tap: _draft_sum(vector, vectors) for tap, vector in added.items()}
        table = vectors.upload(self.device)
        made = {
            gate: probe_of(gate, table[at : at + 1], fired)
            for gate, at in probes.items()
        }
        return made, {tap: draft(table) for tap, draft in sums.items()}

    def _decided(
        self, gates: Iterable[Gate], fired: FiredCounts | None
    ) -> tuple[Deciding, ...]:
        return tuple(
            Deciding(
                gate,
                0 if fired is None else fired.place(gate.condition),
                self._probes[gate].doses,
            )
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

    def _measure(self, memory: DoseMemory | None) -> None:
        """Assign a column of doses to every instruction, if they are measured."""
        if memory is None:
            return
        added = {
            tap: replace(one, kind=Kind.MEASURE) if tap not in self.taps else one
            for tap, one in self._sums.items()
        }
        effects = [
            *(effect_of(gate.condition, gate.column) for gate in self._probes),
            *(Effect(*tap, "add", "") for tap in added),
            *(
                Effect(*one.tap, one.op, one.digest)
                for one in map(self.operations.__getitem__, self._acting)
            ),
        ]
        if not effects:
            return
        self.effects = measured_effects(effects)
        self.doses = memory.with_columns(len(effects))
        columns = (self.doses[:, number] for number in range(len(effects)))
        self._probes = {
            gate: replace(one, doses=next(columns))
            for gate, one in self._probes.items()
        }
        self._sums = {
            tap: replace(one, doses=next(columns)) for tap, one in added.items()
        }
        self._instructions = {
            number: replace(one, doses=next(columns))
            for number, one in self._instructions.items()
        }

    def at_positions(self, active: frozenset[int]) -> Programs:
        """The programs of tokens on which these operations with positions act.

        Operations with one row per position are handled in `moving.py`.
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
        return max(one.first.last(prompt_length) for one in self.positioned)

    def _placed(self, taps: Collection[Tap], active: frozenset[int]) -> Programs:
        programs = {tap: self._program(tap, active) for tap in sorted(taps)}
        return place({t: p for t, p in programs.items() if p}, self.device)

    def _program(self, tap: Tap, active: frozenset[int]) -> Program:
        return tuple(made for _, made in self.numbered(tap, active))

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
            yield -1, replace(made, gate=self._columns[number])

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
        return replace(made, gate=column_of(gate), flags=made.flags | latch)


def _together(operations: Sequence[Operation]) -> list[Together]:
    by_positions: dict[Spans, list[int]] = {}
    for number, one in enumerate(operations):
        if one.positions is not None:
            by_positions.setdefault(one.positions, []).append(number)
    return [
        Together(operations[numbers[0]], tuple(numbers))
        for numbers in by_positions.values()
    ]


def place(programs: Mapping[Tap, Program], device: torch.device) -> Programs:
    """Copy programs to the device, if a kernel executes them there."""
    if not reads_tables(device):
        return {tap: Placed(one, 0, None) for tap, one in programs.items()}
    if not programs:
        return {}
    words = [words_of(program) for program in programs.values()]
    storage = async_tensor_h2d(np.concatenate(words), device, torch.int32)
    starts = np.cumsum([0, *map(len, words)]) * storage.element_size()
    return {
        tap: Placed(program, storage.data_ptr() + int(start), storage)
        for (tap, program), start in zip(programs.items(), starts)
    }


NO_PHASE = Phase((), {}, (), 0, torch.device("cpu"))


class ProgramIndex:
    """Device index of programs by hook point and row, `[taps, rows]`, int64 addresses.

    The rows of configurations come first, as in the tables of vectors; the rows after
    them are for tokens on which operations with positions act, and are rewritten in
    each step. CUDA graphs hold the index's address.
    """

    def __init__(
        self, taps: Sequence[Tap], num_rows: int, num_tokens: int, device: torch.device
    ) -> None:
        self._columns = {tap: column for column, tap in enumerate(taps)}
        self.first_special = num_rows
        length = round_up(num_rows + num_tokens, ALIGNMENT // torch.int64.itemsize)
        self._index = torch.zeros(len(taps), length, dtype=torch.int64, device=device)
        self.gates = torch.zeros(num_tokens, GATE_COLUMNS, device=device)
        self._programs: dict[int, Programs] = {}

    def at(self, tap: Tap) -> torch.Tensor:
        """The index `[rows]` of one hook point."""
        return self._index[self._columns[tap]]

    @property
    def num_bytes(self) -> int:
        """Device memory of the index and the gates."""
        return self._index.nbytes + self.gates.nbytes

    def of_row(self, row: int) -> Programs:
        """The programs of a row."""
        return self._programs.get(row, {})

    def write(self, row: int, programs: Programs) -> None:
        """Set the programs of a configuration's row."""
        before = self._programs.get(row, {})
        self._programs[row] = programs
        if programs or before:
            self._write(row, [programs])

    def write_special(self, programs: Sequence[Programs]) -> None:
        """Set the programs of the rows for single tokens, from the first on."""
        for number, one in enumerate(programs):
            self._programs[self.first_special + number] = one
        self._write(self.first_special, programs)

    def _write(self, row: int, programs: Sequence[Programs]) -> None:
        if not programs or not reads_tables(self._index.device):
            return  # No kernel reads the index.
        addresses = np.zeros((len(self._columns), len(programs)), dtype=np.int64)
        for number, one in enumerate(programs):
            for tap, placed in one.items():
                addresses[self._columns[tap], number] = placed.address
        found = async_tensor_h2d(addresses, self._index.device, torch.int64)
        self._index[:, row : row + len(programs)] = found


def special_rows(
    phase: Phase, prompt_length: int, start: int, stop: int
) -> tuple[list[frozenset[int]], npt.NDArray[np.intp]]:
    """Find which operations with positions act on the tokens at `[start, stop)`.

    Returns:
        The distinct, nonempty sets of operation numbers, and for each token the index
        of its set `[stop - start]`, -1 if none acts.

    """
    acts = np.zeros((stop - start, len(phase.positioned)), dtype=bool)
    for column, one in enumerate(phase.positioned):
        for places in one.first.ranges(prompt_length, start, stop):
            acts[places.start - start : places.stop - start, column] = True
    found = np.full(stop - start, -1, dtype=np.intp)
    anywhere = np.flatnonzero(acts.any(axis=1))
    if not len(anywhere):
        return [], found
    distinct, which = np.unique(acts[anywhere], axis=0, return_inverse=True)
    found[anywhere] = which.reshape(-1)
    sets = [
        frozenset(
            chain.from_iterable(
                phase.positioned[column].numbers for column in np.flatnonzero(row)
            )
        )
        for row in distinct
    ]
    return sets, found

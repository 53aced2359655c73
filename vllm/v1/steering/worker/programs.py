# SPDX-License-Identifier: Apache-2.0
"""From operations to programs on the device: what ops of hook points carry out.

A phase of a configuration (its prompt tokens, or its generated ones) has a program at
each hook point where it has operations. What such a phase adds there is part of the
program, so that the order of operations holds. Operations at single positions make
further programs, of tokens at which they act.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from vllm.model_executor.layers.residual.capture_op import ALIGNMENT
from vllm.model_executor.layers.residual.program import (
    Activation,
    Flag,
    Instruction,
    Kind,
    Program,
    words_of,
)
from vllm.utils.math_utils import round_up
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.steering.operations import Operation, place_of
from vllm.v1.steering.plan import Tap, Vector
from vllm.v1.steering.worker.gates import (
    GATES,
    Gate,
    column_of,
    in_columns,
    probe_of,
)


class Placed(NamedTuple):
    """A program, and where the device has it."""

    program: Program
    address: int
    """0 where no kernel reads it."""
    storage: torch.Tensor | None
    """Keeps the memory at the address."""


Programs = dict[Tap, Placed]
"""What a token goes through, by hook point."""


class _Vectors:
    """Distinct vectors of a phase, which go to the device together."""

    def __init__(self, width: int) -> None:
        self.width = width
        self._numbers: dict[bytes, int] = {}
        self._rows: list[Vector] = []

    def add(self, vector: Vector) -> int:
        """The number of a vector `[H]`."""
        data = vector.tobytes()
        if data not in self._numbers:
            self._numbers[data] = len(self._rows)
            self._rows.append(vector)
        return self._numbers[data]

    def add_rows(self, rows: npt.NDArray[np.float32]) -> int:
        """The number of the first of several, which stay together."""
        first = len(self._rows)
        self._rows.extend(rows)
        return first

    def upload(self, device: torch.device) -> torch.Tensor:
        """All of them, float32 `[vectors, H]`."""
        if not self._rows:
            return torch.empty(0, 0, device=device)
        return async_tensor_h2d(np.stack(self._rows), device, torch.float32)


Draft = Callable[[torch.Tensor], Instruction]
"""An instruction, once its vectors are on the device."""


def _unit(vector: Vector) -> Vector:
    """Of length 1, normed in double precision."""
    wide = vector.astype(np.float64)
    return (wide / np.linalg.norm(wide)).astype(np.float32)


def _draft_sum(vector: Vector, vectors: _Vectors) -> Draft:
    """The addition of a vector as it is."""
    at = vectors.add(vector)
    return lambda table: Instruction(Kind.LINEAR, table[at : at + 1], c0=1.0)


def _draft(one: Operation, vectors: _Vectors) -> Draft:
    """What carries an operation out."""
    if one.op in _OTHERS:
        return _OTHERS[one.op](one, vectors)
    directed = one.norm_match or one.op in ("project_out", "clamp")
    vector = _unit(one.vector) if directed else np.asarray(one.vector)
    mask = one.details.array("mask")
    masked = None if mask is None else vectors.add(mask)
    at = vectors.add(vector)
    low = -np.inf if one.low is None else one.low
    high = np.inf if one.high is None else one.high
    plain, matched = (0.0, one.scale) if one.norm_match else (one.scale, 0.0)

    def make(table: torch.Tensor) -> Instruction:
        read = table[at : at + 1]
        if one.op == "project_out":
            return Instruction(Kind.LINEAR, read, flags=Flag.DOT, c2=-one.scale)
        if one.op == "clamp":
            strength = one.details.strength
            return Instruction(
                Kind.LINEAR, read, flags=Flag.DOT, c3=strength, low=low, high=high
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
            )
        return Instruction(Kind.LINEAR, read, c0=plain, c1=matched)

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
    """Where the probe of a gate reads."""
    return frozenset() if gate is None else frozenset({gate.condition.tap})


class Phase:
    """What the tokens of one phase of a configuration go through beyond additions."""

    def __init__(
        self,
        operations: Sequence[Operation],
        added: Mapping[Tap, Vector],
        taps: Collection[Tap],
        width: int,
        device: torch.device,
        gates: Sequence[Gate | None] = (),
    ) -> None:
        """Put it on the device.

        Args:
            operations: all that act in the phase, the engine's before a request's.
            added: what is added at each token beside them, by hook point.
            taps: the hook points of this process.
            width: of the stream.
            device: of the stream.
            gates: of each operation; empty if none has any.

        """
        pairs = zip(operations, gates or [None] * len(operations), strict=True)
        here = [(one, gate) for one, gate in pairs if one.tap in taps]
        here.sort(key=lambda pair: place_of(pair[0]))
        self._operations = [one for one, _ in here]
        self._gates = [gate for _, gate in here]
        self.taps = frozenset(one.tap for one in self._operations).union(
            *(_read_by(gate) for gate in self._gates)
        )
        """Where programs also add what is added."""
        self._device = device
        vectors = _Vectors(width)
        drafts = [_draft(one, vectors) for one in self._operations]
        probes = {
            gate: vectors.add(gate.condition.vector) for gate in in_columns(self._gates)
        }
        sums = {
            tap: _draft_sum(vector, vectors)
            for tap, vector in added.items()
            if tap in self.taps
        }
        table = vectors.upload(device)
        self._instructions = [
            replace(draft(table), gate=column_of(gate))
            for draft, gate in zip(drafts, self._gates, strict=True)
        ]
        self._probes = {
            gate: probe_of(gate, table[at : at + 1]) for gate, at in probes.items()
        }
        self._sums = {tap: draft(table) for tap, draft in sums.items()}
        self.positioned = [
            (number, one)
            for number, one in enumerate(self._operations)
            if one.positions is not None
        ]
        """Operations that act at some positions, with their numbers."""
        self.fixed = self._placed(self.taps, frozenset())
        """What tokens go through at which none of these acts."""
        self._special: dict[frozenset[int], Programs] = {}

    def at_positions(self, active: frozenset[int]) -> Programs:
        """What tokens go through at which some positioned operations act, by number."""
        if active not in self._special:
            taps = {self._operations[number].tap for number in active}.union(
                *(_read_by(self._gates[number]) for number in active)
            )
            placed = self.fixed | self._placed(taps, active)
            self._special[active] = placed
        return self._special[active]

    def last_position(self, prompt_length: int) -> int:
        """The last position at which one of the positioned operations acts."""
        return max(one.last(prompt_length) for _, one in self.positioned)

    def _placed(self, taps: Collection[Tap], active: frozenset[int]) -> Programs:
        programs = {tap: self._program(tap, active) for tap in sorted(taps)}
        return place({t: p for t, p in programs.items() if p}, self._device)

    def _program(self, tap: Tap, active: frozenset[int]) -> Program:
        """In order, with the norm saved before the first addition if one needs it.

        Probes come first: they see the stream as a capture at this point does.
        """
        numbers = [
            number
            for number, one in enumerate(self._operations)
            if one.positions is None or number in active
        ]
        probes = [
            self._probes[gate]
            for gate in in_columns(self._gates[number] for number in numbers)
            if gate.condition.tap == tap
        ]
        acting = [
            (self._operations[number], self._instructions[number])
            for number in numbers
            if self._operations[number].tap == tap
        ]
        replaces = [made for one, made in acting if one.op == "replace"]
        adds = [self._sums[tap]] if tap in self._sums else []
        adds += [made for one, made in acting if one.op == "add"]
        if any(made.c1 for made in adds):
            adds[0] = replace(adds[0], flags=adds[0].flags | Flag.SAVE_NORM)
        others = [made for one, made in acting if one.op not in ("replace", "add")]
        return (*probes, *replaces, *adds, *others)


def place(programs: Mapping[Tap, Program], device: torch.device) -> Programs:
    """Programs where kernels find them; elsewhere they stay as they are."""
    if device.type == "cpu":
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
    """Which program each row stands for, at each hook point `[taps, rows]`.

    The rows of configurations come first, as in the tables of vectors; behind them are
    rows for tokens at which operations with positions act, anew in each step. Recorded
    graphs hold the address.
    """

    def __init__(
        self, taps: Sequence[Tap], num_rows: int, num_tokens: int, device: torch.device
    ) -> None:
        self._columns = {tap: column for column, tap in enumerate(taps)}
        self.first_special = num_rows
        length = round_up(num_rows + num_tokens, ALIGNMENT // torch.int64.itemsize)
        self._index = torch.zeros(len(taps), length, dtype=torch.int64, device=device)
        self.gates = torch.zeros(num_tokens, GATES, dtype=torch.float32, device=device)
        self._programs: dict[int, Programs] = {}

    def at(self, tap: Tap) -> torch.Tensor:
        """The index `[rows]` of one hook point."""
        return self._index[self._columns[tap]]

    @property
    def num_bytes(self) -> int:
        """Device memory of the index and the gates."""
        return self._index.nbytes + self.gates.nbytes

    def of_row(self, row: int) -> Programs:
        """What tokens of a row go through."""
        return self._programs.get(row, {})

    def write(self, row: int, programs: Programs) -> None:
        """Let a row of a configuration stand for other programs."""
        before = self._programs.get(row, {})
        self._programs[row] = programs
        if programs or before:
            self._write(row, [programs])

    def write_special(self, programs: Sequence[Programs]) -> None:
        """Let the rows for single tokens stand for these, from the first on."""
        for number, one in enumerate(programs):
            self._programs[self.first_special + number] = one
        self._write(self.first_special, programs)

    def _write(self, row: int, programs: Sequence[Programs]) -> None:
        if self._index.device.type == "cpu":
            return  # No kernel reads it.
        addresses = np.zeros((len(self._columns), len(programs)), dtype=np.int64)
        for number, one in enumerate(programs):
            for tap, placed in one.items():
                addresses[self._columns[tap], number] = placed.address
        found = async_tensor_h2d(addresses, self._index.device, torch.int64)
        self._index[:, row : row + len(programs)] = found


def special_rows(
    phase: Phase, prompt_length: int, start: int, stop: int
) -> tuple[list[frozenset[int]], npt.NDArray[np.intp]]:
    """Which positioned operations act at the tokens at positions `[start, stop)`.

    Returns:
        The distinct sets of operations' numbers, none of them empty, and for each token
        the index of its set `[stop - start]`, -1 where none acts.

    """
    acts = np.zeros((stop - start, len(phase.positioned)), dtype=bool)
    for column, (_, one) in enumerate(phase.positioned):
        for places in one.ranges(prompt_length, start, stop):
            acts[places.start - start : places.stop - start, column] = True
    found = np.full(stop - start, -1, dtype=np.intp)
    anywhere = np.flatnonzero(acts.any(axis=1))
    if not len(anywhere):
        return [], found
    distinct, which = np.unique(acts[anywhere], axis=0, return_inverse=True)
    found[anywhere] = which.reshape(-1)
    numbers = np.array([number for number, _ in phase.positioned])
    return [frozenset(numbers[row].tolist()) for row in distinct], found

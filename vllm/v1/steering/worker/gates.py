# SPDX-License-Identifier: Apache-2.0
"""Conditions on the device: the column that each decides, and who reads it.

The engine's conditions have the first columns, those of a request's configuration the
ones that follow: what a change of the engine's vectors does to the former, no request
notices in its own.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import torch

from vllm.model_executor.layers.residual.program import (
    NO_GATE,
    Flag,
    Instruction,
    Kind,
)
from vllm.v1.steering.conditions import MAX_CONDITIONS, Condition
from vllm.v1.steering.operations import Operation
from vllm.v1.steering.plan import PackedVectors, SteeringTiers, conditions_of

GATES = 2 * MAX_CONDITIONS
"""Columns of the gates: a multiple of four, so that all is aligned."""


class Gate(NamedTuple):
    """A condition, and the column in which its decisions stand."""

    condition: Condition
    column: int


Gated: TypeAlias = tuple[Operation, Gate | None]
"""An operation with the gate that it waits for."""


def gated(
    tiers: SteeringTiers, parts: Iterable[PackedVectors | None], first: int
) -> list[Gated]:
    """The operations of some tiers with their gates.

    Args:
        tiers: all of a configuration: in each of its phases a condition has the same
            column.
        parts: those that act in a phase.
        first: the first column of the configuration's owner.

    """
    gates = {one: Gate(one, first + n) for n, one in enumerate(conditions_of(tiers))}
    assert len(gates) <= MAX_CONDITIONS, "admission has let too many conditions pass"
    return [
        (one, None if one.details.when is None else gates[one.details.when])
        for part in parts
        if part is not None
        for one in part.operations
    ]


def column_of(gate: Gate | None) -> int:
    """The column that an instruction reads."""
    return NO_GATE if gate is None else gate.column


def probe_of(gate: Gate, vector: torch.Tensor) -> Instruction:
    """What decides a gate.

    Args:
        gate: the condition and its column.
        vector: its probe, float32 `[1, hidden_size]` on the device.

    """
    condition = gate.condition
    flags = Flag.COSINE if condition.cosine else Flag.NONE
    if condition.scope == "rest":
        flags |= Flag.KEEP
    return Instruction(
        Kind.PROBE,
        vector,
        flags=flags,
        c0=condition.bias,
        c1=condition.sharpness,
        c2=condition.threshold,
        c3=1.0 if condition.above else -1.0,
        gate=gate.column,
    )


def in_columns(gates: Iterable[Gate | None]) -> Sequence[Gate]:
    """Each gate once, by its column."""
    found = {one.column: one for one in gates if one is not None}
    return [found[column] for column in sorted(found)]


def deciding(decode: Iterable[Gated]) -> list[Gate]:
    """The gates of generated tokens that the last one of the prompt decides."""
    gates = (gate for _, gate in decode)
    return [gate for gate in in_columns(gates) if gate.condition.scope == "prompt"]

# SPDX-License-Identifier: Apache-2.0
"""Gate columns: each condition decides one column, which instructions read.

The engine's conditions take the first columns, those of a request's configuration the
following ones, so a change of the global vectors does not move the request's columns.
So do activations of transcoders, which further columns hold.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch

from vllm.model_executor.layers.residual.program import (
    GATES,
    MOST_STORED,
    NO_GATE,
    STORED,
    Flag,
    Kind,
)
from vllm.v1.steering.conditions import MAX_CONDITIONS, Condition
from vllm.v1.steering.features import MAX_CARRIED
from vllm.v1.steering.plan import Operation, PackedVectors, SteeringTiers, operations_of
from vllm.v1.steering.worker.bank import Draft
from vllm.v1.steering.worker.fired import FiredCounts

assert GATES == 2 * MAX_CONDITIONS, "the engine's conditions and those of a request"
assert MOST_STORED == 2 * MAX_CARRIED, "the engine's activations and a request's"


class Gate(NamedTuple):
    """A condition and the column of its decisions."""

    condition: Condition
    column: int


@dataclass(frozen=True, slots=True, eq=False)
class Deciding:
    """A gate that is decided for later tokens."""

    gate: Gate
    count: int = 0
    """Index of the condition's count in `FiredCounts`."""
    doses: torch.Tensor | None = None  # [T]
    """The doses of the condition, if they are measured."""


def decided(condition: Condition, value: torch.Tensor) -> torch.Tensor:
    """The gate of a probe's value, in its shape; see `Condition`."""
    beyond = value - condition.threshold
    beyond = beyond if condition.above else -beyond
    if condition.sharpness:
        return torch.sigmoid(condition.sharpness * beyond)
    return (beyond > 0).to(value.dtype)


Reader: TypeAlias = tuple[Operation, Gate | None, int]
"""An operation, the gate on which it depends, if any, and the column of its
transcoder's activation, or `NO_GATE`."""


def readers_of(
    tiers: SteeringTiers, parts: Iterable[PackedVectors | None], of_engine: bool
) -> list[Reader]:
    """Assign columns of gates and of activations to operations of a configuration.

    Args:
        tiers: the whole configuration; in each of its phases a condition, or an
            operation with an activation, has the same column.
        parts: the tiers that act in one phase.
        of_engine: whether these are the engine's; else they are a request's.

    """
    first, stored = 0, STORED
    if not of_engine:
        first, stored = first + MAX_CONDITIONS, stored + MAX_CARRIED
    gates = {one: Gate(one, first + n) for n, one in enumerate(tiers.conditions)}
    columns = {digest: stored + n for n, digest in enumerate(tiers.carried)}
    assert len(gates) <= MAX_CONDITIONS, "admission accepted too many conditions"
    assert len(columns) <= MAX_CARRIED, "admission accepted too many activations"
    return [
        (
            one,
            None if one.details.when is None else gates[one.details.when],
            columns.get(one.digest, NO_GATE),
        )
        for one in operations_of(*parts)
    ]


def draft_probe(gate: Gate, fired: FiredCounts) -> Draft:
    """Draft the instruction that decides a gate.

    Args:
        gate: the condition and its column.
        fired: counts the tokens at which the condition fires.

    """
    condition = gate.condition
    flags = Flag.COSINE if condition.cosine else Flag.NONE
    if condition.scope == "rest":
        flags |= Flag.KEEP
    if condition.in_prompt:
        flags |= Flag.LATCH
    if condition.mean:
        flags |= Flag.VALUE
    # One decision counts, which `HeldGates` selects.
    is_held = condition.scope == "prompt"
    return {
        "kind": Kind.PROBE,
        "read": condition.vector[None],
        "flags": flags,
        "c0": condition.bias,
        "c1": condition.sharpness,
        "c2": condition.threshold,
        "c3": 1.0 if condition.above else -1.0,
        "gate": gate.column,
        "fired": None if is_held else fired.of(condition),
    }


def in_columns(gates: Iterable[Gate | None]) -> Sequence[Gate]:
    """The distinct gates, sorted by column."""
    found = {one.column: one for one in gates if one is not None}
    return [found[column] for column in sorted(found)]


def deciding(decode: Iterable[Reader]) -> list[Gate]:
    """The gates for generated tokens that the last prompt token decides."""
    gates = (gate for _, gate, _ in decode)
    return [gate for gate in in_columns(gates) if gate.condition.scope == "prompt"]

# SPDX-License-Identifier: Apache-2.0
"""Decisions that hold for later tokens, for every split of tokens into steps."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from tests.support.programs import run
from vllm.model_executor.layers.residual.program import (
    GATE_COLUMNS,
    Flag,
    Instruction,
    Kind,
)
from vllm.v1.residual.step_view import StepView
from vllm.v1.steering.conditions import Condition
from vllm.v1.steering.worker.fired import FiredCounts
from vllm.v1.steering.worker.gates import Deciding, Gate
from vllm.v1.steering.worker.held_gates import FIRST_ROOM, HeldGates
from vllm.v1.steering.worker.requests import tokens_of

CPU = torch.device("cpu")
PROMPT, REST, MEAN, SPREADS = 3, 9, 10, 11
"""Columns of a condition of the engine and of three of a request."""
LAST = Condition(0, "pre_attn", b"", 0.0, False, True, 0.5, 0.0, "prompt", "")
AVERAGE = structs.replace(LAST, mean=True)
DECIDING = Deciding(Gate(LAST, PROMPT)), Deciding(Gate(AVERAGE, MEAN))
WITHIN = structs.replace(LAST, scope="rest", in_prompt=True)
PHASES: Any = {
    1: SimpleNamespace(
        deciding=DECIDING,
        held=(SPREADS,),
        latched=(),
        spreading=(Deciding(Gate(WITHIN, SPREADS)),),
    ),
    2: SimpleNamespace(
        deciding=(),
        held=(PROMPT, REST, MEAN, SPREADS),
        latched=(REST,),
        spreading=(Deciding(Gate(WITHIN, SPREADS)),),
    ),
}
ONE = torch.ones(1, 1)
PROBE = Instruction(
    Kind.PROBE, ONE, flags=Flag.KEEP | Flag.LATCH, c2=0.5, c3=1.0, gate=SPREADS
)
ACTS = Instruction(Kind.LINEAR, ONE, flags=Flag.LATCH, c0=1.0, gate=SPREADS)


def spread(values: list[float], gates: torch.Tensor) -> list[float]:
    """The gates at a later hook point than the probe, which reads `values`."""
    tokens = torch.arange(len(values))
    # As at a hook point with several programs, which do not keep the tokens' order.
    for part in (tokens[1::2], tokens[::2]):
        run((PROBE,), torch.tensor(values)[part, None], part, gates)
    added, _ = run((ACTS,), torch.zeros(len(values), 1), tokens, gates)
    return added[:, 0].tolist()


def carried_out(
    held: HeldGates, requests: dict[str, tuple[int, range]], fires: Any
) -> tuple[dict[tuple[str, int], tuple[float, float]], dict[tuple[str, int], float]]:
    """Run a step; returns `PROMPT` and `REST` at each generated token, and `SPREADS` at
    each token.

    `fires` has the positions of a request at which the probe exceeds its threshold.
    """
    names = list(requests)
    spans = [span for _, span in requests.values()]
    counts = np.array([len(span) for span in spans])
    view = StepView(
        names, np.array([s.start for s in spans]), counts, int(counts.sum())
    )
    lengths = [length for length, _ in requests.values()]
    # The content that an earlier step has left.
    gates = torch.rand(int(counts.sum()) + 2, GATE_COLUMNS)
    held.plan(tokens_of(view, [(1, 2)] * len(names), lengths), PHASES)
    held.load(gates)
    places = [(name, position) for name in names for position in requests[name][1]]
    within = spread([float(fires(*place)) for place in places], gates)
    found, row = {}, 0
    for name, (length, span) in requests.items():
        for position in span:
            fired = float(fires(name, position))
            if position < length:
                gates[row, PROMPT] = fired
            else:
                gates[row, REST] = max(float(gates[row, REST]), fired)
                pair = float(gates[row, PROMPT]), float(gates[row, REST])
                found[name, position] = pair
            row += 1
    held.save(gates)
    return found, dict(zip(places, within, strict=True))


@given(
    seed=st.integers(0, 2**32 - 1),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4),
)
def test_however_tokens_are_split_each_finds_what_was_decided(
    seed: int, sizes: list[int]
) -> None:
    """Prompts are chunked; a request may be preempted and start again."""
    random = np.random.default_rng(seed)
    held = HeldGates(CPU, FiredCounts(CPU))
    rate = random.uniform(0, 0.6)
    fired = {(str(i), p): random.random() < rate for i in range(4) for p in range(16)}

    def fires(name: str, position: int) -> bool:
        return fired[name, position]

    done = {str(index): 0 for index in range(len(sizes))}
    most = dict(done)
    for _ in range(14):
        batch = {}
        for name in done:
            if random.random() < 0.1:
                done[name] = int(random.integers(0, done[name] + 1))  # Preempted.
            length, start = sizes[int(name)], done[name]
            # New generated tokens arrive one by one; others may be recomputed.
            stop = length if most[name] < length else min(most[name] + 1, 16)
            stop = min(stop, start + int(random.integers(1, 5)))
            if start < stop and random.random() < 0.8:
                batch[name] = length, range(start, stop)
        later, each = carried_out(held, batch, fires)
        for (name, position), is_open in each.items():
            assert is_open == any(fires(name, p) for p in range(position + 1))
        for (name, position), (prompt, rest) in later.items():
            length = sizes[int(name)]
            assert prompt == fires(name, length - 1)
            assert rest == any(fires(name, p) for p in range(length, position + 1))
        for name, (_, span) in batch.items():
            done[name] = span.stop
            most[name] = max(most[name], span.stop)


def test_places_are_used_again_and_memory_grows() -> None:
    held = HeldGates(CPU, FiredCounts(CPU))
    for turn in range(2):
        names = [f"{turn}-{index}" for index in range(FIRST_ROOM + 3)]
        first = {name: (2, range(2)) for name in names}
        carried_out(held, first, lambda name, position: name.startswith("0"))
        later = {name: (2, range(2, 3)) for name in names}
        found, _ = carried_out(held, later, lambda name, position: False)
        assert set(found.values()) == {(1.0 - turn, 0.0)}
        held.forget(names)
    assert len(held._value) == 2 * FIRST_ROOM


def test_other_conditions_of_the_engine_are_not_decided() -> None:
    held = HeldGates(CPU, FiredCounts(CPU))
    carried_out(held, {"a": (2, range(2))}, lambda name, position: True)
    carried_out(held, {"a": (2, range(2, 3))}, lambda name, position: True)
    held.forget_engines()
    asked = {"a": (2, range(3, 4))}
    found, _ = carried_out(held, asked, lambda name, position: False)
    assert found == {("a", 3): (0.0, 1.0)}


def test_the_mean_over_a_prompt_decides_however_it_is_chunked() -> None:
    fired = FiredCounts(CPU)
    held = HeldGates(CPU, fired)
    count = fired.place(AVERAGE)
    doses = torch.full((8, 1), torch.nan)
    own = Deciding(Gate(AVERAGE, MEAN), count, doses[:, 0])
    phases: Any = {
        1: SimpleNamespace(deciding=(own,), held=(), latched=(), spreading=()),
        2: SimpleNamespace(deciding=(), held=(MEAN,), latched=(), spreading=()),
    }

    def step(name: str, start: int, values: list[float], length: int) -> float:
        gates = torch.rand(8, GATE_COLUMNS)
        view = StepView([name], np.array([start]), np.array([len(values)]), 8)
        held.plan(tokens_of(view, [(1, 2)], [length]), phases)
        held.load(gates)
        if start < length:
            gates[: len(values), MEAN] = torch.tensor(values)
        held.save(gates)
        return float(gates[0, MEAN])

    step("above", 0, [9.0, 9.0], 4)  # Preempted; begun again from the first token.
    for name, values, gate in (
        ("above", [0.0, 0.0, 0.0, 3.0], 1.0),
        ("below", [3.0, -3.0, 1.0, 0.9], 0.0),
    ):
        step(name, 0, values[:1], 4)
        step(name, 1, values[1:3], 4)
        doses.fill_(torch.nan)
        step(name, 3, values[3:], 4)
        assert doses[0, 0] == gate
        assert step(name, 4, [0.0], 4) == step(name, 5, [0.0], 4) == gate
    fired.send()
    assert fired.collect() == [("", 0, "pre_attn", 1)]

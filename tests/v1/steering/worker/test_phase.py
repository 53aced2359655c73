# SPDX-License-Identifier: Apache-2.0
"""The programs of a step's tokens, and their effect, compared with float64."""

import ctypes
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.programs import run
from vllm.v1.residual.spans import spans_of
from vllm.v1.residual.step_view import StepView
from vllm.v1.residual.tap import Tap
from vllm.v1.steering.plan import (
    Operation,
    PackedVectors,
    SteeringTiers,
    in_order,
    operation,
    pack,
)
from vllm.v1.steering.slots import SteeringStep, prefill_row
from vllm.v1.steering.worker.doses import Route
from vllm.v1.steering.worker.phase import Phase
from vllm.v1.steering.worker.worker import WorkerSteering

TAP = (1, "post_attn")
OTHER = (2, "post_attn")
WIDTH = 5
CPU = torch.device("cpu")


def made(op: Any, positions: Any = None, seed: int = 0, **fields: Any) -> Operation:
    vector = np.random.default_rng(seed).normal(size=WIDTH).astype(np.float32)
    bounds = fields.get("low"), fields.get("high")
    scale, match = fields.get("scale", 1.0), fields.get("norm_match", False)
    where = None if positions is None else spans_of(positions)
    return operation(TAP, op, vector, scale, bounds, match, where)


def tiers(**named: list[Operation]) -> SteeringTiers:
    return SteeringTiers(
        **{
            name: PackedVectors((), memoryview(b""), "", tuple(operations))
            for name, operations in named.items()
        }
    )


def phase_of(operations: list[Operation], added: Any = ()) -> Phase:
    tables = worker().tables
    tables.load(0, SteeringTiers(pack(dict(added), operations)))
    return tables.phases[prefill_row(0)]


def worker(
    taps: Sequence[Tap] = (TAP, OTHER),
    width: int = WIDTH,
    dtype: torch.dtype = torch.float32,
    route: Route = Route.OUTPUT,
    stages: int = 1,
) -> WorkerSteering:
    config: Any = SimpleNamespace(
        steering_config=SimpleNamespace(num_rows=11, bank_bytes=0),
        capture_config=SimpleNamespace(takes_actions=False),
        compilation_config=SimpleNamespace(max_cudagraph_capture_size=None),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64),
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages),
        max_concurrent_batches=stages,
    )
    return WorkerSteering(config, taps, width, dtype, CPU, {}.__getitem__, route)


Requests = list[tuple[int, int, int]]
"""Computed tokens, tokens of the step, tokens of the prompt, by request."""


def view(requests: Requests) -> StepView:
    scheduled = np.array([n for _, n, _ in requests])
    return StepView(
        [str(index) for index in range(len(requests))],
        np.array([computed for computed, _, _ in requests]),
        scheduled,
        int(scheduled.sum()),
    )


def begun(steering: WorkerSteering, requests: Requests, one: SteeringTiers) -> None:
    """Create requests that share a configuration."""
    names = [(str(i), size) for i, (_, _, size) in enumerate(requests)]
    uses = dict.fromkeys(dict(names), 0)
    steering.update([], names, SteeringStep([(0, one)], uses))


def carried_out(steering: WorkerSteering, requests: Requests) -> dict[int, list[int]]:
    """The number of instructions of each token of a step at the hook point."""
    launched = steering.plan_step(view(requests))
    steering.begin_step()
    address = steering.program_addresses[TAP]
    found: dict[int, list[int]] = {}
    programs = steering.tables.programs.at(TAP)[steering.program_rows]
    for token, place in enumerate(programs.tolist()):
        if place:
            count = ctypes.c_int32.from_address(place).value
            found.setdefault(count, []).append(token)
    assert (address in launched) == bool(found)
    steering.end_step()
    return {count: sorted(tokens) for count, tokens in found.items()}


@given(
    requests=st.lists(
        st.tuples(st.integers(0, 8), st.integers(1, 6), st.integers(1, 9)),
        min_size=1,
        max_size=4,
    ),
    positions=st.none() | st.lists(st.integers(-4, 12), min_size=1, max_size=4),
    tier=st.sampled_from(["base", "prefill", "decode"]),
)
def test_each_selected_token_of_the_tier_is_changed_once(
    requests: Requests, positions: Any, tier: str
) -> None:
    steering = worker()
    begun(steering, requests, tiers(**{tier: [made("project_out", positions)]}))
    expected, row = [], 0
    for computed, n, size in requests:
        for position in range(computed, computed + n):
            in_tier = tier == "base" or (tier == "prefill") == (position < size)
            chosen = positions is None or any(
                position == (p if p >= 0 else size + p) for p in positions
            )
            expected += [row] if in_tier and chosen else []
            row += 1
    found = carried_out(steering, requests)
    assert found == ({1: expected} if expected else {})


def test_a_position_of_one_step_is_not_that_of_the_next() -> None:
    """Steps of one token each, which are otherwise treated as equal."""
    steering = worker()
    begun(steering, [(2, 1, 2)], tiers(base=[made("replace", [4, 6])]))
    found = [bool(carried_out(steering, [(p, 1, 2)])) for p in range(2, 9)]
    assert found == [False, False, True, False, True, False, False]


def test_steps_that_go_on_have_the_programs_of_the_one_before() -> None:
    steering = worker()
    begun(steering, [(2, 1, 2)], tiers(decode=[made("project_out")]))
    assert [carried_out(steering, [(p, 1, 2)]) for p in range(2, 6)] == [{1: [0]}] * 4
    steering.update(["0"], [], None)
    assert carried_out(steering, [(6, 1, 2)]) == {}


def test_an_operation_written_twice_acts_twice() -> None:
    one = made("add", [0])
    steering = worker()
    begun(steering, [(0, 2, 2)], tiers(base=[one, one]))
    assert carried_out(steering, [(0, 2, 2)]) == {2: [0]}


def test_positions_of_several_operations_make_one_program_each() -> None:
    steering = worker()
    first, second = made("replace", [0, 1, 2]), made("project_out", [-1], 1)
    begun(steering, [(0, 4, 3)], tiers(base=[first, second]))
    assert carried_out(steering, [(0, 4, 3)]) == {1: [0, 1], 2: [2]}


def test_what_is_added_where_operations_act_is_left_to_the_program() -> None:
    steering = worker()
    ones = np.ones(WIDTH, dtype=np.float32)
    both = pack({TAP: ones, OTHER: ones}, [made("replace", [1])])
    begun(steering, [(0, 3, 2)], SteeringTiers(base=both))
    assert carried_out(steering, [(0, 3, 2)]) == {1: [0, 2], 2: [1]}
    rows = steering.row_index[:3].long()
    assert (steering.tables.at(OTHER)[rows] == 1).all()
    assert (steering.tables.at(TAP)[rows] == 0).all()


def test_the_engines_operations_come_before_a_requests() -> None:
    steering = worker()
    begun(steering, [(0, 1, 1)], tiers(base=[made("replace", seed=1)]))
    steering.stage_global(tiers(base=[made("replace", seed=2)]))
    steering.commit_global(True)
    steering.plan_step(view([(0, 1, 1)]))
    steering.begin_step()
    row = int(steering.program_rows[0])
    program = steering.tables.programs.of_row(row)[TAP].program
    read = [one.read[0].numpy() for one in program]
    expected = [made("replace", seed=seed).vector for seed in (2, 1)]
    steering.end_step()
    assert np.array_equal(read, expected)


def reference(x: torch.Tensor, added: torch.Tensor, ops: list[Operation]) -> Any:
    """The result for one token, in float64, by the definitions."""
    vectors = [torch.tensor(one.vector, dtype=torch.float64) for one in ops]
    units = [v / v.norm() for v in vectors]

    def brought(i: int, length: torch.Tensor) -> torch.Tensor:
        scale = ops[i].scale
        return scale * (length * units[i] if ops[i].norm_match else vectors[i])

    for i, one in enumerate(ops):
        if one.op == "replace":
            x = brought(i, x.norm())
    before = x.norm()
    x = x + added
    for i, one in enumerate(ops):
        if one.op == "add":
            x = x + brought(i, before)
    for i, one in enumerate(ops):
        c = x @ units[i]
        if one.op == "project_out":
            x = x - one.scale * c * units[i]
        elif one.op == "clamp":
            x = x + (c.clamp(one.low, one.high) - c) * units[i]
    return x


@given(
    kinds=st.lists(
        st.tuples(
            st.sampled_from(["replace", "add", "project_out", "clamp"]),
            st.booleans(),
            st.sampled_from([0.5, 1.0, -2.0]),
            st.none() | st.sets(st.integers(0, 5), min_size=1),
        ),
        min_size=1,
        max_size=5,
    ),
    adds=st.booleans(),
)
def test_programs_equal_the_float64_reference(kinds: list, adds: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    stream = torch.randn(6, WIDTH, generator=generator)
    added = torch.randn(WIDTH, generator=generator) * adds
    ops: list[Operation] = []
    for seed, (op, match, scale, positions) in enumerate(kinds):
        fields: dict[str, Any] = {"low": -0.5, "high": 0.25} if op == "clamp" else {}
        if op in ("add", "replace"):
            fields["norm_match"] = match
        ops.append(made(op, positions, seed, scale=scale, **fields))
    ordered = in_order(ops)
    phase = phase_of(ops, {TAP: added.numpy()} if adds else {})
    for place, row in enumerate(stream):
        acting = [
            number
            for number, one in enumerate(ordered)
            if one.selected(6, place, place + 1)
        ]
        active = frozenset(n for n in acting if ordered[n].positions is not None)
        programs = phase.at_positions(active) if active else phase.fixed
        found = row[None]
        if TAP in programs:
            tokens = torch.tensor([place])
            found, _ = run(programs[TAP].program, found, tokens, torch.zeros(6, 4))
        expected = reference(row.double(), added.double(), [ordered[n] for n in acting])
        assert torch.allclose(found[0].double(), expected, rtol=1e-4, atol=1e-4)

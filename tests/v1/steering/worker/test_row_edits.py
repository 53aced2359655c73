# SPDX-License-Identifier: Apache-2.0
"""Which rows operations change, and how, against loops in float64."""

from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm.model_executor.layers.residual.row_edits import (
    RowEdit,
    apply_edits,
    edited_rows,
)
from vllm.v1.capture.staging.blocks import StepView
from vllm.v1.steering.operations import OP_NAMES, Operation, in_order, operation
from vllm.v1.steering.plan import PackedVectors, SteeringTiers
from vllm.v1.steering.worker.row_edits import plan_edits

TAP = (1, "post_attn")
WIDTH = 5


def made(op: Any, positions: Any = None, seed: int = 0, **fields: Any) -> Operation:
    vector = np.random.default_rng(seed).normal(size=WIDTH).astype(np.float32)
    bounds = fields.get("low"), fields.get("high")
    scale, match = fields.get("scale", 1.0), fields.get("norm_match", False)
    return operation(TAP, op, vector, scale, bounds, match, positions)


def tiers(**named: list[Operation]) -> SteeringTiers:
    return SteeringTiers(
        **{
            name: PackedVectors((), memoryview(b""), "", tuple(operations))
            for name, operations in named.items()
        }
    )


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
    requests: list, positions: Any, tier: str
) -> None:
    one = made("project_out", positions)
    names = [str(index) for index in range(len(requests))]
    scheduled = np.array([n for _, n, _ in requests])
    view = StepView(
        names,
        np.array([computed for computed, _, _ in requests]),
        scheduled,
        int(scheduled.sum()),
    )
    lengths = {name: size for name, (_, _, size) in zip(names, requests, strict=True)}
    found = plan_edits(view, lambda _: [tiers(**{tier: [one]})], lengths, {TAP})
    expected, row = [], 0
    for computed, n, size in requests:
        for position in range(computed, computed + n):
            in_tier = tier == "base" or (tier == "prefill") == (position < size)
            chosen = positions is None or any(
                position == (p if p >= 0 else size + p) for p in positions
            )
            expected += [row] if in_tier and chosen else []
            row += 1
    assert [sorted(rows) for _, rows in found.get(TAP, [])] == [expected] * bool(
        expected
    )


def reference(x: torch.Tensor, added: torch.Tensor, ops: list[Operation]) -> Any:
    """One token, in float64, as the semantics say."""
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
            st.sampled_from(OP_NAMES),
            st.booleans(),
            st.sampled_from([0.5, 1.0, -2.0]),
            st.sets(st.integers(0, 5), min_size=1),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_edits_equal_the_float64_reference(kinds: list) -> None:
    generator = torch.Generator().manual_seed(0)
    stream = torch.randn(6, WIDTH, generator=generator)
    table = torch.randn(6, WIDTH, generator=generator)
    ops: list[tuple[Operation, set[int]]] = []
    for seed, (op, match, scale, rows) in enumerate(kinds):
        fields: dict[str, Any] = {"low": -0.5, "high": 0.25} if op == "clamp" else {}
        if op in ("add", "replace"):
            fields["norm_match"] = match
        ops.append((made(op, None, seed, scale=scale, **fields), rows))
    rows_of = {id(one): rows for one, rows in ops}
    ordered = in_order([one for one, _ in ops])
    edits = [
        RowEdit(
            torch.tensor(sorted(rows_of[id(one)])),
            one.op,
            torch.tensor(one.vector),
            one.scale,
            one.low,
            one.high,
            one.norm_match,
        )
        for one in ordered
    ]
    rows = edited_rows(edits)
    found = apply_edits(edits, rows, stream[rows], table[rows])
    for index, row in enumerate(rows.tolist()):
        mine = [one for one in ordered if row in rows_of[id(one)]]
        expected = reference(stream[row].double(), table[row].double(), mine)
        assert torch.allclose(found[index].double(), expected, rtol=1e-4, atol=1e-4)


def test_an_operation_written_twice_acts_twice() -> None:
    one = made("add", [0])
    view = StepView(["a"], np.array([0]), np.array([2]), 2)
    found = plan_edits(view, lambda _: [tiers(base=[one, one])], {"a": 2}, {TAP})
    assert [rows for _, rows in found[TAP]] == [[0], [0]]

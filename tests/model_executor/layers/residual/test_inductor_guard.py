# SPDX-License-Identifier: Apache-2.0
"""The ops that compiled code calls, by Inductor's generated lines and by execution."""

import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch._inductor.codegen.custom_extern_kernel_codegen import (
    CUSTOM_EXTERN_KERNEL_CODEGEN,
)
from torch._inductor.utils import run_and_get_code
from torch.nn.functional import linear

from tests.model_executor.layers.residual.tracing import traced, treated
from tests.support.compiler import needs_compiler
from vllm.model_executor.layers.residual.capture_op import Launch
from vllm.model_executor.layers.residual.inductor_guard import (
    CONDITIONS,
    guard_calls,
)
from vllm.model_executor.layers.residual.tap import ResidualTap
from vllm.v1.worker.residual_graph_choice import GraphFamilies

WIDTH, TOKENS = 8, 5
STRANGE = frozenset({1})
"""An address of another engine: no tensor here has it."""
pytestmark = [pytest.mark.usefixtures("no_engine"), needs_compiler]


@pytest.fixture(autouse=True)
def compiles_anew() -> Iterator[None]:
    """Force compilation, and restore Inductor's table afterwards."""
    with (
        patch.dict(CUSTOM_EXTERN_KERNEL_CODEGEN),
        torch._inductor.config.patch(force_disable_caches=True),
    ):
        yield


@pytest.fixture
def tap() -> ResidualTap:
    table, rows = torch.randn(3, WIDTH), torch.tensor([0, 1, 2, 1, 0]).int()
    slots, base = torch.arange(TOKENS).int(), torch.zeros(1).int()
    index, gates = torch.zeros(4, dtype=torch.int64), torch.zeros(TOKENS, 4)
    staging = torch.zeros(TOKENS, WIDTH)
    return ResidualTap(slots, base, staging, table, rows, index, rows, gates)


def compiled(tap: ResidualTap) -> Callable[..., Any]:
    weights = [torch.randn(WIDTH, WIDTH) for _ in range(2)]

    def model(hidden: torch.Tensor) -> torch.Tensor:
        residual = hidden * 2
        hidden = linear(linear(hidden, weights[0]).tanh(), weights[1])
        hidden, residual = tap(hidden, residual)
        return hidden + residual

    return traced(model, treated, compiled=True)


def test_each_call_stands_behind_its_condition(tap: ResidualTap) -> None:
    guard_calls()
    with torch.no_grad():
        _, (code,) = run_and_get_code(compiled(tap), torch.randn(TOKENS, WIDTH))
    found = set(re.findall(r"^ *Launch.+", code, re.MULTILINE))
    begun = {re.sub(r"\(\w+\)", "()", line.strip()) for line in found}
    asked, called = "Launch.taps and Launch.wants() and ", "wanted"
    if torch.cuda.is_available():
        asked, called = f"{asked}torch.ops.vllm.", "rows"
    assert sorted({re.sub(r"(\.default)?\(\w+,.*", "", line) for line in begun}) == [
        f"{asked}capture_rows",
        f"{asked}intervene_{called}",
        f"{asked}steer_rows",
        "Launch.whole and torch.ops.vllm.steer_rows_ahead",
    ]


def test_an_op_is_called_where_it_launches_and_else_not(tap: ResidualTap) -> None:
    """An op that is called with a tensor of no engine reports it."""
    guard_calls()
    assert tap.table is not None and tap.slots is not None and tap.staging is not None
    run, hidden = compiled(tap), torch.randn(TOKENS, WIDTH)
    with torch.no_grad():
        Launch.known = STRANGE
        plain = run(hidden)
        Launch.taps = STRANGE
        with pytest.raises(RuntimeError, match="memory other than its own"):
            run(hidden)
        known = (tap.slots, tap.table, tap.index)
        Launch.taps = frozenset(one.data_ptr() for one in known if one is not None)
        steered = run(hidden)
    assert tap.rows is not None
    torch.testing.assert_close(steered, plain + tap.table[tap.rows])
    torch.testing.assert_close(tap.staging, plain)


def test_until_the_first_step_every_op_looks_at_what_it_is_given(
    tap: ResidualTap,
) -> None:
    guard_calls()
    run, hidden = compiled(tap), torch.randn(TOKENS, WIDTH)
    graphs = GraphFamilies([frozenset(), STRANGE], may_record=False)
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="memory other than its own"):
            run(hidden)
        graphs.plan(frozenset(), frozenset())
        run(hidden)


def test_it_knows_every_op_of_hook_points() -> None:
    """An op that is added elsewhere must get its condition."""
    ours = {
        name.split("::")[1]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("vllm::")
        and any(part in name for part in ("capture_", "steer_", "intervene_"))
    }
    assert ours == set(CONDITIONS)

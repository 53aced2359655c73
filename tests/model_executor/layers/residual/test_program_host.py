# SPDX-License-Identifier: Apache-2.0
"""The native library's programs; `apart/test_kernel.py` compares each with float64."""

from typing import Any

import pytest
import torch

from tests.support.programs import run
from vllm.model_executor.layers.residual.capture_op import Launch
from vllm.model_executor.layers.residual.program import (
    Flag,
    Instruction,
    Kind,
    Program,
    words_of,
)
from vllm.model_executor.layers.residual.program_host import execute_programs
from vllm.model_executor.layers.residual.program_op import intervene_rows
from vllm.model_executor.layers.residual.spread import WHOLE

pytestmark = pytest.mark.usefixtures("no_engine")


def index_of(*programs: Program) -> tuple[torch.Tensor, Any]:
    """An index with the programs as rows 1 and later, and the memory it refers to."""
    words = [torch.from_numpy(words_of(one)) for one in programs]
    return torch.tensor([0, *(one.data_ptr() for one in words)]), (words, programs)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int16), other.view(torch.int16))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_are_rounded_as_by_pytorch(dtype: torch.dtype) -> None:
    """To the nearest value, ties to even: subnormal numbers, infinities and NaN too."""
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    exact = values.float()
    between = torch.cat([exact, (exact[1:] + exact[:-1]) / 2, exact * 1.0001])
    between = torch.cat([between, torch.tensor([65519.9, 65520.0, 3.4e38, 1e-45])])
    given = between.view(1, -1).contiguous()
    program = (Instruction(Kind.REPLACE, given, c0=1.0),)
    index, _kept = index_of(program)
    found = torch.zeros(given.shape, dtype=dtype)
    rows, gates = torch.ones(1, dtype=torch.int32), torch.zeros(1, 4)
    execute_programs(found, found, None, index, rows, gates)
    expected = given.to(dtype)
    number = ~expected.isnan()
    assert torch.equal(found.isnan(), expected.isnan())
    assert same_bits(found[number], expected[number])
    index, _kept = index_of((Instruction(Kind.LINEAR, torch.ones_like(given), c0=1.0),))
    execute_programs(found, found, None, index, rows, gates)
    expected = (expected.float() + 1)[number].to(dtype)
    assert same_bits(found[number], expected)


@pytest.mark.parametrize("has_residual", [True, False])
def test_rows_that_are_adjacent_or_apart_become_those_of_the_reference(
    has_residual: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    tokens, width = 7, 40
    u, v = torch.nn.functional.normalize(torch.randn(2, 1, width), dim=-1)
    clamp = Instruction(Kind.LINEAR, u, flags=Flag.DOT, c3=1.0, low=0.1, high=0.2)
    programs = (clamp,), (Instruction(Kind.REPLACE, v, c0=3.0, alpha=0.5), clamp)
    index, _kept = index_of(*programs)
    rows = torch.tensor([0, 1, 2, 0, 2, 1, 0, 0], dtype=torch.int32)
    given = torch.randn(tokens, width)
    residual = torch.randn(tokens, width) if has_residual else None
    monkeypatch.setattr(Launch, "taps", frozenset({index.data_ptr()}))
    wanted = given.clone() if residual is None else given + residual
    for row, program in enumerate(programs, 1):
        of_row = (rows[:tokens] == row).nonzero()[:, 0]
        wanted[of_row], changed = run(
            program, wanted[of_row], of_row, torch.zeros(8, 4)
        )
        assert changed.all()
    found = []
    wide = torch.zeros(tokens, 2 * width)
    for apart, batched in ((False, False), (True, False), (True, True)):
        hidden, other = given.clone(), None if residual is None else residual.clone()
        if apart:
            hidden = wide[:, :width].copy_(given)
        pair = hidden, other
        if batched:  # [1, T, H], as the Transformers backend has it
            pair = hidden[None], None if other is None else other[None]
        intervene_rows(*pair, index, rows, torch.zeros(8, 4), WHOLE)
        assert torch.equal(hidden[rows[:tokens] == 0], given[rows[:tokens] == 0])
        found.append(hidden if other is None else hidden + other)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    torch.testing.assert_close(found[0], wanted)

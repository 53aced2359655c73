# SPDX-License-Identifier: Apache-2.0
"""The kernels for programs, compared with float64: on a GPU, or interpreted."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from tests.support.programs import run
from vllm.model_executor.layers.residual import steer_op
from vllm.model_executor.layers.residual.program import (
    GATE_COLUMNS,
    NEVER,
    OPENED,
    SEGMENT,
    STORED,
    Activation,
    Flag,
    Instruction,
    Kind,
    Program,
    words_of,
)
from vllm.model_executor.layers.residual.program_host import execute_programs
from vllm.model_executor.layers.residual.program_kernel import launch_programs
from vllm.triton_utils import HAS_TRITON
from vllm.v1.residual.native import library

pytestmark = [
    pytest.mark.usefixtures("no_engine"),
    pytest.mark.skipif(not HAS_TRITON, reason="neither a GPU nor the interpreter"),
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROUNDING = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Twice the distance of neighbouring values, as the interpreter truncates."""


Execute = Callable[..., None]
NO_NATIVE = DEVICE == "cuda" or library() is None
native = pytest.param(
    execute_programs,
    marks=pytest.mark.skipif(NO_NATIVE, reason="a GPU, or no native library"),
    id="native",
)


LAUNCHES = [
    pytest.param(launch_programs, id="triton"),
    native,
]


@pytest.fixture(params=LAUNCHES)
def launch(request: pytest.FixtureRequest) -> Execute:
    """Executes programs: a kernel of Triton, or the native library."""
    return request.param


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE)


def unit(width: int) -> torch.Tensor:
    vector = randn(1, width)
    return vector / vector.norm()


def plane(width: int) -> tuple[torch.Tensor, torch.Tensor]:
    basis = torch.linalg.qr(torch.randn(width, 2))[0].T.contiguous().to(DEVICE)
    return basis[:1], basis[1:]


def programs(width: int, tokens: int) -> dict[str, Program]:
    u, v = unit(width), unit(width)
    first, second = plane(width)
    rows, writes = randn(3, width) / width**0.5, randn(3, width)
    bias = torch.tensor([0.1, -0.2, 0.3], device=DEVICE)
    rivals, biases = randn(24, width) / width**0.5, randn(24)
    mask = (torch.arange(width, device=DEVICE) % 3 / 2).contiguous()
    project = Instruction(Kind.LINEAR, u, flags=Flag.DOT, c2=-1.0)
    matched = Instruction(Kind.LINEAR, v, flags=Flag.SAVE_NORM, c1=0.3)
    low_rank: Any = {"write": writes, "c1": 0.7, "bias": bias, "threshold": bias}
    return {
        "add": (Instruction(Kind.LINEAR, v, c0=1.5),),
        "add, matched": (matched,),
        "project": (project,),
        "clamp": (
            Instruction(Kind.LINEAR, u, flags=Flag.DOT, c3=0.8, low=-0.1, high=0.2),
        ),
        "swap": (Instruction(Kind.LINEAR, u, write=(v - u), flags=Flag.DOT, c2=1.0),),
        "replace": (Instruction(Kind.REPLACE, v, c0=2.0),),
        "replace, mixed": (Instruction(Kind.REPLACE, v, c0=2, alpha=0.3),),
        "replace, masked": (
            Instruction(Kind.REPLACE, v, flags=Flag.SAVE_NORM, c1=1, mask=mask),
        ),
        "replace, by rows": (
            Instruction(Kind.REPLACE, randn(tokens + 2, width), c0=1.0, offset=2),
        ),
        "rotate": (Instruction(Kind.ROTATE, first, write=second, c0=0.6, c1=-0.8),),
        **{
            f"low rank, {activation.name}": (
                Instruction(
                    Kind.LOW_RANK,
                    rows,
                    activation=activation,
                    low=-0.2,
                    high=0.4,
                    **low_rank,
                ),
            )
            for activation in Activation
            if activation != Activation.SELECT
        },
        **{
            f"features, {most} of 24 above {low}, {flags!r}": (
                Instruction(
                    Kind.LOW_RANK,
                    rivals[3:6],
                    write=writes,
                    flags=flags,
                    activation=Activation.SELECT,
                    bias=biases[3:6],
                    threshold=biases,
                    mask=rivals,
                    low=low,
                    c2=most,
                    c3=24.0,
                    own_c0=4 * bias,
                    own_c1=bias - 1,
                ),
            )
            for most, low, flags in (
                (12.0, 0.0, Flag.NONE),
                (5.0, float("-inf"), Flag.COSINE),
                (9.0, 0.0, Flag.STANDARD | Flag.ONLY_ACTIVE),
            )
        },
        "feature": (
            Instruction(
                Kind.LOW_RANK,
                rows[:1],
                write=writes[:1],
                flags=Flag.ONLY_ACTIVE,
                c0=2.0,
                c1=-1.0,
                activation=Activation.RELU,
            ),
        ),
        **{
            f"features, {flags!r}": (
                Instruction(
                    Kind.LOW_RANK,
                    rows,
                    write=writes,
                    flags=flags,
                    activation=Activation.JUMPRELU,
                    bias=bias,
                    threshold=bias.abs(),
                    own_c0=4 * bias,
                    own_c1=bias - 1,
                ),
            )
            for flags in (Flag.NONE, Flag.COSINE, Flag.STANDARD | Flag.ONLY_ACTIVE)
        },
        "gated": (
            Instruction(Kind.PROBE, u, c3=1.0, gate=1),
            Instruction(Kind.LINEAR, v, c0=3.0, gate=1),
        ),
        "gated by a sigmoid": (
            Instruction(
                Kind.PROBE, u, flags=Flag.COSINE, c0=0.1, c1=4.0, c3=-1.0, gate=2
            ),
            Instruction(Kind.REPLACE, v, c0=3.0, gate=2),
        ),
        "by the probe's value": (
            Instruction(Kind.PROBE, u, flags=Flag.VALUE, c0=0.3, c3=1.0, gate=1),
            Instruction(Kind.LINEAR, v, c0=3.0, gate=1),
        ),
        "many": (
            Instruction(Kind.REPLACE, v, c0=2.0, alpha=0.5),
            matched,
            project,
            Instruction(Kind.ROTATE, first, write=second, c0=0.6, c1=-0.8),
            project,
        ),
    }


def exactly(program: Program, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Rows `[n, H]` after a program, by the reference in float64."""
    numbers = [
        {
            field.name: value.double()
            for field in fields(one)
            if torch.is_tensor(value := getattr(one, field.name))
        }
        for one in program
    ]
    exact = tuple(replace(o, **n) for o, n in zip(program, numbers))
    gates = torch.zeros(int(tokens.max()) + 1, 4, device=DEVICE, dtype=torch.float64)
    return run(exact, rows, tokens, gates)[0]


def index_of(program: Program) -> tuple[torch.Tensor, Any]:
    """An index whose row 1 is the program, and the tensors that must stay alive."""
    words = torch.from_numpy(words_of(program)).to(DEVICE)
    return torch.tensor([0, words.data_ptr(), 0, 0], device=DEVICE), (words, program)


@pytest.mark.parametrize(
    ("dtype", "has_residual", "tokens", "width"),
    [
        (torch.float32, True, 3, 130),
        (torch.float16, False, 3, 130),
        (torch.bfloat16, True, 5, 96),
    ],
)
def test_each_program_does_what_its_formula_says(
    launch: Execute,
    dtype: torch.dtype,
    has_residual: bool,
    tokens: int,
    width: int,
) -> None:
    torch.manual_seed(width)
    for name, program in programs(width, tokens).items():
        index, _kept = index_of(program)
        rows = torch.arange(tokens + 2, dtype=torch.int32, device=DEVICE) % 2
        hidden = randn(tokens, width).to(dtype)
        residual = randn(tokens, width).to(dtype) if has_residual else None
        gates = torch.zeros(tokens, 4, device=DEVICE)
        found = hidden.clone()
        beside = None if residual is None else residual.clone()
        launch(found, found, beside, index, rows, gates)
        others = rows[:tokens] == 0
        assert torch.equal(found[others], hidden[others])
        assert residual is None or torch.equal(beside[others], residual[others])
        chosen = (~others).nonzero()[:, 0]
        before, after = (
            one.double() if other is None else one.double() + other.double()
            for one, other in ((hidden, residual), (found, beside))
        )
        expected = exactly(program, before[chosen], chosen)
        largest = expected.abs().amax(1, keepdim=True)
        error = ((after[chosen] - expected).abs() / largest).max()
        assert error < ROUNDING[dtype], f"{name}: {error}"


def test_the_kernel_equals_the_arithmetic_of_a_cpu_and_measures_doses(
    launch: Execute,
) -> None:
    torch.manual_seed(0)
    tokens, width = 2, 96
    every = torch.arange(tokens, device=DEVICE)
    rows = torch.ones(tokens, dtype=torch.int32, device=DEVICE)
    added = Instruction(Kind.MEASURE, randn(1, width))
    for name, program in {**programs(width, tokens), "measure": (added,)}.items():
        doses = [torch.full((tokens, 8), torch.nan, device=DEVICE) for _ in range(2)]
        fired = [torch.zeros(1, dtype=torch.int64, device=DEVICE) for _ in range(2)]
        measured = [
            tuple(
                replace(
                    one,
                    doses=memory[:, number],
                    fired=count if one.kind == Kind.PROBE else None,
                )
                for number, one in enumerate(program)
            )
            for memory, count in zip(doses, fired, strict=True)
        ]
        stream = randn(tokens, width)
        gates = [torch.zeros(tokens, 4, device=DEVICE) for _ in range(3)]
        plain, counted = stream.clone(), stream.clone()
        index, _kept = index_of(program)
        launch(plain, plain, None, index, rows, gates[0])
        index, _kept = index_of(measured[0])
        launch(counted, counted, None, index, rows, gates[1])
        assert torch.equal(plain, counted) and torch.equal(gates[0], gates[1]), name
        expected, changed = run(measured[1], stream.clone(), every, gates[2])
        torch.testing.assert_close(gates[0], gates[2], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(plain, expected, rtol=1e-5, atol=1e-5, msg=name)
        assert torch.equal((plain != stream).any(1), changed), name
        torch.testing.assert_close(*doses, rtol=1e-4, atol=1e-5, equal_nan=True)
        assert torch.equal(*fired), name
        if len(program) == 1:
            before = stream - added.read if name == "measure" else stream
            after = stream if name == "measure" else plain
            expected = (after - before).norm(dim=1) / before.norm(dim=1)
            torch.testing.assert_close(doses[0][:, 0], expected, rtol=1e-4, atol=1e-5)


def test_ranks_with_a_share_of_the_tokens_store_doses_at_the_steps_rows(
    launch: Execute,
) -> None:
    width, tokens = 64, 4
    doses = torch.full((tokens, 2), torch.nan, device=DEVICE)
    program = (Instruction(Kind.LINEAR, unit(width), c0=1.0, doses=doses[:, 1]),)
    index, _kept = index_of(program)
    rows = torch.ones(tokens, dtype=torch.int32, device=DEVICE)
    gates = torch.zeros(tokens, 4, device=DEVICE)
    part = unit(width).expand(2, width).contiguous()
    launch(part, part, None, index, rows[2:], gates[2:], first=2)
    assert doses[:2].isnan().all() and doses[:, 0].isnan().all()
    torch.testing.assert_close(doses[2:, 1], torch.ones(2, device=DEVICE))


def test_a_gate_that_was_open_stays_open(launch: Execute) -> None:
    torch.manual_seed(0)
    tokens, width = 8, 64
    program = (
        Instruction(Kind.PROBE, unit(width), flags=Flag.KEEP, c3=1.0, gate=1),
        Instruction(Kind.LINEAR, unit(width), c0=3.0, gate=1),
    )
    index, _kept = index_of(program)
    rows = torch.ones(tokens, dtype=torch.int32, device=DEVICE)
    stream, before = randn(tokens, width), torch.zeros(tokens, 4, device=DEVICE)
    before[::2] = 1.0
    gates = [before.clone() for _ in range(2)]
    every = torch.arange(tokens, device=DEVICE)
    expected, _ = run(program, stream.clone(), every, gates[0])
    found = stream.clone()
    launch(found, found, None, index, rows, gates[1])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(gates[1], gates[0])
    assert gates[0][::2, 1].all() and not gates[0][1::2, 1].all()


@pytest.mark.parametrize("divided", [Flag.NONE, Flag.COSINE, Flag.STANDARD])
def test_later_hook_points_read_what_probes_have_left(
    launch: Execute, divided: Flag
) -> None:
    """A gate that is open from one token of a request on, and a value."""
    torch.manual_seed(0)
    tokens, width = 9, 96
    first = [0] * 5 + [5] * 3 + [8]  # Of each token's request.
    stream, probe, v = randn(tokens, width), randn(1, width), randn(1, width)
    stream[6] += probe[0]  # The second token of its request fires.
    latch = Flag.KEEP | Flag.LATCH
    value = STORED + 3
    given = torch.tensor([0.3], device=DEVICE)
    hook_points: tuple[Program, ...] = (
        (
            Instruction(Kind.PROBE, probe, flags=latch, c2=50.0, c3=1.0, gate=2),
            Instruction(Kind.PROBE, v, flags=divided | Flag.VALUE, gate=value),
        ),
        (
            Instruction(Kind.LINEAR, v, flags=Flag.LATCH, c0=0.5, gate=2),
            Instruction(
                Kind.LINEAR,
                probe,
                flags=Flag.CARRIED | Flag.ONLY_ACTIVE,
                c0=0.2,
                c1=-0.1,
                bias=given,
                threshold=given,
                stored=value,
            ),
        ),
    )
    every = torch.arange(tokens, device=DEVICE)
    rows = torch.ones(tokens, dtype=torch.int32, device=DEVICE)
    found, all_gates = [stream.clone(), stream.clone()], []
    for way in range(2):
        gates = torch.zeros(tokens, GATE_COLUMNS, device=DEVICE)
        noted = gates.view(torch.int32)
        noted[:, SEGMENT] = torch.tensor(first, dtype=torch.int32, device=DEVICE)
        noted[:, OPENED:SEGMENT] = NEVER
        gates[8, 2] = 1.0  # Open since an earlier step.
        all_gates.append(gates)
        for program in hook_points:
            if way:
                index, _kept = index_of(program)
                launch(found[1], found[1], None, index, rows, gates)
            else:
                found[0], _ = run(program, found[0], every, gates)
        assert noted[[0, 5, 8], OPENED + 2].tolist() == [NEVER, 6, 8]
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)
    values = [gates[:, value] for gates in all_gates]
    torch.testing.assert_close(values[1], values[0], rtol=1e-5, atol=1e-5)
    by = {Flag.COSINE: stream.norm(dim=1), Flag.STANDARD: stream.std(dim=1) + 1e-5}
    y = (stream @ v[0]) / by.get(divided, 1.0) + given
    amount = torch.where(y > given, 0.2 - 0.1 * y, 0.0)
    is_open = torch.tensor([False] * 6 + [True] * 3, device=DEVICE)
    expected = stream + 0.5 * is_open[:, None] * v + amount[:, None] * probe
    torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("divided", "most", "low"),
    [
        (Flag.NONE, 9.0, float("-inf")),
        (Flag.COSINE, 12.0, 0.0),
        (Flag.STANDARD, 9.0, float("-inf")),
    ],
)
def test_a_later_hook_point_reads_an_activation_that_was_selected(
    launch: Execute, divided: Flag, most: float, low: float
) -> None:
    torch.manual_seed(0)
    tokens, width, column = 12, 96, STORED + 3
    stream, v = randn(tokens, width), randn(1, width)
    rivals, biases = randn(24, width), randn(24)
    biases[3] = 0.5  # Sometimes among the largest, whatever the rows are divided by.
    gates = torch.zeros(tokens, GATE_COLUMNS, device=DEVICE)
    select = Instruction(
        Kind.LOW_RANK,
        rivals[3:4],
        flags=divided | Flag.VALUE,
        activation=Activation.SELECT,
        bias=biases[3:4],
        threshold=biases,
        mask=rivals,
        low=low,
        c2=most,
        c3=24.0,
        doses=gates[:, column],
    )
    act = Instruction(
        Kind.LINEAR,
        v,
        flags=Flag.CARRIED | Flag.ONLY_ACTIVE,
        c0=2.0,
        c1=-1.0,
        threshold=torch.full((1,), -torch.inf, device=DEVICE),
        stored=column,
    )
    rows = torch.ones(tokens, dtype=torch.int32, device=DEVICE)
    found = stream.clone()
    for program in ((select,), (act,)):
        index, _kept = index_of(program)
        launch(found, found, None, index, rows, gates)
        if program == (select,):
            assert torch.equal(found, stream), "it only stores"
    assert 0 < gates[:, column].count_nonzero() < tokens
    gates[:, column] = 0.0
    run((select,), stream, torch.arange(tokens, device=DEVICE), gates)
    again, _ = run((act,), stream, torch.arange(tokens, device=DEVICE), gates)
    torch.testing.assert_close(again, found, rtol=1e-5, atol=1e-5)


def test_what_acts_on_nothing_changes_no_bit(launch: Execute) -> None:
    width = 64
    u = unit(width)
    idle: tuple[Program, ...] = (
        (Instruction(Kind.LINEAR, u, flags=Flag.DOT, c3=1.0, low=-99, high=99),),
        (Instruction(Kind.LINEAR, u, c0=0.0),),
        (Instruction(Kind.REPLACE, u, c0=1.0, alpha=0.0),),
        (
            Instruction(Kind.PROBE, u, c2=99.0, c3=1.0, gate=0),
            Instruction(Kind.REPLACE, u, c0=1.0, gate=0),
        ),
    )
    for program in idle:
        index, _kept = index_of(program)
        hidden, residual = randn(2, width).bfloat16(), randn(2, width).bfloat16()
        found, beside = hidden.clone(), residual.clone()
        rows = torch.ones(2, dtype=torch.int32, device=DEVICE)
        gates = torch.zeros(2, 4, device=DEVICE)
        launch(found, found, beside, index, rows, gates)
        assert torch.equal(found, hidden) and torch.equal(beside, residual)


def test_a_rank_that_does_not_lead_has_nothing_of_the_result(
    launch: Execute,
) -> None:
    width = 64
    index, _kept = index_of((Instruction(Kind.REPLACE, unit(width), c0=1.0),))
    whole, residual = randn(2, width), randn(2, width)
    part, beside = whole / 2, residual.clone()
    rows = torch.tensor([1, 0], dtype=torch.int32, device=DEVICE)
    gates = torch.zeros(2, 4, device=DEVICE)
    launch(whole, part, beside, index, rows, gates, leads=False)
    assert not part[0].any() and not beside[0].any()
    assert torch.equal(part[1], whole[1] / 2) and torch.equal(beside[1], residual[1])


def test_ranks_that_share_tokens_read_the_rows_of_the_step(
    launch: Execute,
) -> None:
    width, tokens = 64, 6
    matrix = randn(tokens + 2, width)
    program = (Instruction(Kind.REPLACE, matrix, c0=1.0, offset=2),)
    index, _kept = index_of(program)
    rows = torch.ones(tokens, dtype=torch.int32, device=DEVICE)
    gates = torch.zeros(tokens, 4, device=DEVICE)
    found = randn(tokens, width)
    for first in (0, 3):
        part = found[first : first + 3]
        launch(part, part, None, index, rows[first:], gates[first:], first=first)
    assert torch.equal(found, matrix[2:])


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("width", [8, 100])
def test_additions_of_one_and_of_two_tables(count: int, width: int) -> None:
    """Rows of small steps, and the loop over wide ones, as PyTorch adds them."""
    tokens, target = 5, torch.randn(5, width, device=DEVICE)
    tables = [torch.randn(4, width, device=DEVICE) for _ in range(count)]
    for table in tables:
        table[0] = 0.0
    rows = [torch.tensor([0, 1, 3, 0, 2, 9]), torch.tensor([0, 0, 1, 2, 3, 9])]
    additions = [(t, r.int().to(DEVICE)) for t, r in zip(tables, rows)]
    expected, wide = target.clone(), target.clone()
    for table, row in additions:
        expected += table[row[:tokens].long()]
        sizes = wide.stride(0), table.stride(0), width
        loop = {"BLOCK": 64, "launch_pdl": False}
        steer_op._steer_rows_kernel[(tokens,)](wide, table, row, *sizes, **loop)
    steer_op._launch_short(target, additions[0], additions[-1])
    assert torch.equal(target, expected)
    assert torch.equal(wide, expected)

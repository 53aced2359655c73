# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm.model_executor.layers.residual import steer_op
from vllm.model_executor.layers.residual.capture_op import Launch
from vllm.model_executor.layers.residual.steer_op import EarlyAdditions
from vllm.model_executor.layers.residual.tap import ResidualTap, _steered_in_graph

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
WIDTH, VECTORS, PADDING = 6, 5, 3
pytestmark = pytest.mark.usefixtures("no_engine")


def launching(*tables: torch.Tensor) -> None:
    """Let the ops that read these tensors launch."""
    Launch.taps = frozenset(table.data_ptr() for table in tables)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A stream, as one tensor or as a pair."""
    torch.manual_seed(draw(st.integers(0, 1000)))
    shape, dtype = (draw(st.integers(1, 12)), WIDTH), draw(st.sampled_from(DTYPES))
    stream = torch.randn(shape).to(dtype)
    return stream, torch.randn(shape).to(dtype) if draw(st.booleans()) else None


def addition(target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A random table for `target`, and each token's row in it."""
    table = torch.randn(VECTORS, target.shape[-1]).to(target.dtype)
    table[0] = -0.0
    rows = torch.randint(VECTORS, (len(target) + PADDING,), dtype=torch.int32)
    return table, rows


def added(
    target: torch.Tensor, table: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """`target` plus each token's vectors, added one by one in double precision."""
    sums = [
        (target[token].double() + table[row].double()).to(target.dtype)
        for token, row in enumerate(rows[: len(target)].tolist())
    ]
    return torch.stack(sums)


@given(pairs(), st.booleans())
def test_each_token_gets_the_vector_of_its_row(
    pair: tuple[torch.Tensor, torch.Tensor | None], batched: bool
) -> None:
    target = pair[0]
    table, rows = addition(target)
    expected = added(target, table, rows)
    if batched:  # [1, T, H], as the Transformers backend has it
        target = target[None]
    launching(table)
    torch.ops.vllm.steer_rows(target, table, rows, None)
    assert torch.equal(target.view(-1, WIDTH), expected)


@pytest.fixture
def recorded(no_engine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the following code as the recording of a whole pass."""
    monkeypatch.setattr(steer_op, "_recording", lambda: True)
    Launch.whole = True


Two = tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def two(target: torch.Tensor) -> Two:
    return addition(target), addition(target)


def begin(
    target: torch.Tensor,
    both: Two,
    *captured: torch.Tensor,
    late: bool | None = None,
) -> None:
    tables, rows = zip(*both, strict=True)
    begin = torch.ops.vllm.steer_rows_ahead
    begin(target, list(tables), list(rows), list(captured), None, late)


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)])
def test_what_was_begun_is_not_added_again(wanted: tuple[bool, bool]) -> None:
    target = torch.randn(4, WIDTH, dtype=torch.bfloat16)
    expected, both = target, two(target)
    for (table, rows), one in zip(both, wanted, strict=True):
        if one:
            expected = added(expected, table, rows)
    launching(*(table for (table, _), one in zip(both, wanted, strict=True) if one))
    begin(target, both)
    assert torch.equal(target, expected)
    for table, rows in both:
        torch.ops.vllm.steer_rows(target, table, rows, None)
    assert torch.equal(target, expected)
    assert not EarlyAdditions.begun
    for table, rows in both:  # The next pass adds again.
        torch.ops.vllm.steer_rows(target, table, rows, None)
    assert not torch.equal(target, expected)


@pytest.mark.usefixtures("recorded")
def test_nothing_is_begun_before_a_capture_that_launches() -> None:
    target = torch.randn(4, WIDTH)
    before, both = target.clone(), two(target)
    slots, others = torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    launching(both[0][0], slots)
    begin(target, both, others, slots)
    assert torch.equal(target, before)
    begin(target, both, others)
    assert torch.equal(target, added(before, *both[0]))


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize(
    ("tokens", "width", "expected"),
    [
        (1, WIDTH, False),
        (2, WIDTH, True),
        (64, WIDTH, True),
        (65, WIDTH, False),
        (2, WIDTH - 2, False),
    ],
)
@pytest.mark.parametrize("batched", [False, True])
def test_a_few_rows_of_a_wide_stream_begin_late(
    tokens: int,
    width: int,
    expected: bool,
    batched: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(steer_op, "WIDE", WIDTH)
    for late in (False, True, None):
        target = torch.randn(tokens, width)
        before, both = target.clone(), two(target)
        begins = late is None or late == expected
        launching(both[0][0])
        begin(target[None] if batched else target, both, late=late)
        after = added(before, *both[0]) if begins else before
        assert torch.equal(target, after)
        assert bool(EarlyAdditions.begun) == begins
        EarlyAdditions.begun.clear()


@pytest.mark.parametrize("whole", [True, False])
def test_nothing_is_begun_outside_of_a_whole_recording(
    whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steer_op, "_recording", lambda: not whole)
    Launch.whole = whole
    target = torch.randn(4, WIDTH)
    before, both = target.clone(), two(target)
    launching(both[0][0], both[1][0])
    begin(target, both)
    assert torch.equal(target, before)
    torch.ops.vllm.steer_rows(target, *both[0], None)
    assert torch.equal(target, added(before, *both[0]))


def test_the_ops_have_fakes_for_compilation() -> None:
    target, table = torch.ones(2, WIDTH), torch.ones(3, WIDTH)
    rows = torch.tensor([0, 1, 0], dtype=torch.int32)
    checks = "test_schema", "test_faketensor"
    steer, ahead = torch.ops.vllm.steer_rows, torch.ops.vllm.steer_rows_ahead
    torch.library.opcheck(
        steer.default, (target, table, rows, target + 1), test_utils=checks
    )
    lists = [table, table], [rows, rows], [rows]
    torch.library.opcheck(
        ahead.default, (target, *lists, target + 1, False), test_utils=checks
    )


@given(pairs(), st.booleans())
def test_compiled_and_eager_taps_steer_alike(
    pair: tuple[torch.Tensor, torch.Tensor | None], launches: bool
) -> None:
    hidden, residual = pair
    table, rows = addition(hidden)
    tap = ResidualTap(None, None, None, table, rows)
    Launch.taps = frozenset({table.data_ptr()}) if launches else frozenset()
    before = hidden.clone(), None if residual is None else residual.clone()
    eager = tap(hidden, residual)
    assert torch.equal(hidden, before[0]), "an eager tap wrote into its argument"
    if residual is not None:
        assert torch.equal(residual, before[1])
    in_graph = _steered_in_graph(hidden, residual, table, rows, False)
    assert torch.equal(hidden, before[0])
    for ours, expected in zip(in_graph, eager, strict=True):
        assert ours is expected is None or torch.equal(ours, expected)

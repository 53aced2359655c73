# SPDX-License-Identifier: Apache-2.0

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm.model_executor.layers.residual import capture_op
from vllm.model_executor.layers.residual.capture_op import Launch
from vllm.model_executor.layers.residual.spread import SUMMANDS, WHOLE
from vllm.model_executor.layers.residual.tap import ResidualTap

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
WIDTH, ROWS, BASE = 6, 40, 5
"""`BASE`: the largest offset of slots."""
ZERO = torch.zeros(1, dtype=torch.int32)
pytestmark = pytest.mark.usefixtures("no_engine")


def launching(slots: torch.Tensor) -> torch.Tensor:
    """Let the tap that reads these slots launch."""
    Launch.taps = frozenset({slots.data_ptr()})
    return slots


@st.composite
def passes(draw: st.DrawFn) -> dict:
    """A pass over tokens, some of which have a slot."""
    num_tokens = draw(st.integers(1, 12))
    padding = draw(st.integers(0, 4))
    slots = draw(st.permutations(range(ROWS)))[:num_tokens]
    wanted = draw(st.lists(st.booleans(), min_size=num_tokens, max_size=num_tokens))
    torch.manual_seed(draw(st.integers(0, 1000)))
    dtype = draw(st.sampled_from(DTYPES))
    shape = (num_tokens, WIDTH)
    return {
        "hidden": torch.randn(shape).to(dtype),
        "residual": torch.randn(shape).to(dtype) if draw(st.booleans()) else None,
        "base": torch.tensor([draw(st.integers(0, BASE))], dtype=torch.int32),
        # A column of a token-major map, as in the worker.
        "map": torch.tensor(
            [[9, s if w else -1] for s, w in zip(slots, wanted)] + [[9, -1]] * padding,
            dtype=torch.int32,
        ),
    }


@given(passes(), st.booleans())
def test_the_op_copies_the_stream_of_each_token_that_has_a_slot(
    one: dict, batched: bool
) -> None:
    hidden, residual = one["hidden"], one["residual"]
    slots = launching(one["map"][:, 1])
    staging = torch.full((ROWS + BASE, WIDTH), 7.0, dtype=hidden.dtype)
    expected, base = staging.clone(), int(one["base"])
    for token in range(len(hidden)):
        if slots[token] >= 0:
            row = hidden[token].double()
            if residual is not None:
                row = row + residual[token].double()
            expected[base + slots[token]] = row.to(hidden.dtype)
    if batched:  # [1, T, H], as the Transformers backend has it
        hidden = hidden[None]
        residual = None if residual is None else residual[None]
    torch.ops.vllm.capture_rows(hidden, residual, slots, one["base"], staging, WHOLE)
    assert torch.equal(staging, expected)


@given(passes())
def test_a_tap_without_vectors_changes_nothing(one: dict) -> None:
    staging = torch.zeros(ROWS + BASE, WIDTH, dtype=one["hidden"].dtype)
    tap = ResidualTap(launching(one["map"][:, 1]), one["base"], staging)
    before = one["hidden"].clone()
    hidden, residual = tap(one["hidden"], one["residual"])
    assert torch.equal(hidden, before)
    assert hidden is one["hidden"]
    assert residual is one["residual"]


def test_the_op_has_a_fake_for_compilation() -> None:
    slots = torch.tensor([0, -1], dtype=torch.int32)
    torch.library.opcheck(
        torch.ops.vllm.capture_rows.default,
        (
            torch.ones(2, WIDTH),
            torch.ones(2, WIDTH),
            slots,
            ZERO,
            torch.zeros(2, WIDTH),
            WHOLE,
        ),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_an_op_that_is_given_a_copy_of_what_it_is_known_by_says_so() -> None:
    slots, staging = torch.zeros(2, dtype=torch.int32), torch.zeros(2, WIDTH)
    hidden = torch.ones(2, WIDTH)

    def capture(slots: torch.Tensor) -> None:
        torch.ops.vllm.capture_rows(hidden, None, slots, ZERO, staging, WHOLE)

    Launch.begin(frozenset(), (frozenset(), frozenset({slots.data_ptr()})))
    capture(slots)
    with pytest.raises(RuntimeError, match="memory other than its own"):
        capture(slots.clone())
    Launch.begin(frozenset(), (frozenset(), frozenset({1})))  # Another engine.
    capture(slots)
    assert (staging == 0).all()


def test_a_part_of_a_sum_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    # Like upstream's sum on a CPU: in place.
    monkeypatch.setattr(
        capture_op, "tensor_model_parallel_all_reduce", lambda part: part.mul_(2)
    )
    hidden, residual = torch.ones(1, WIDTH), torch.ones(1, WIDTH)
    staging = torch.zeros(1, WIDTH)
    slots = launching(torch.zeros(1, dtype=torch.int32))
    torch.ops.vllm.capture_rows(hidden, residual, slots, ZERO, staging, SUMMANDS)
    assert (staging == 3).all()
    assert (hidden == 1).all() and (residual == 1).all()

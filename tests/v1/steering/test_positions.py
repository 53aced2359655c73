# SPDX-License-Identifier: Apache-2.0
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.steering.positions import (
    describe,
    last_of,
    missed,
    most_at_once,
    spans,
)
from vllm.v1.steering.spec.entry import parse_positions

LISTED = st.lists(st.integers(-6, 12), min_size=1, max_size=6)


def absolute(listed: list[int], prompt: int) -> set[int]:
    return {p if p >= 0 else prompt + p for p in listed}


def within(positions: Any, prompt: int, start: int, stop: int) -> set[int]:
    return {p for one in positions for p in one.within(prompt, start, stop)}


@given(LISTED, st.integers(1, 8), st.integers(0, 9), st.integers(0, 9))
def test_spans_have_the_positions_that_were_listed(
    listed: list[int], prompt: int, start: int, count: int
) -> None:
    step = range(start, start + count)
    found = within(spans(listed), prompt, step.start, step.stop)
    assert found == absolute(listed, prompt) & set(step)
    assert last_of(spans(listed), prompt) == max(absolute(listed, prompt))


@given(LISTED, st.integers(1, 8), st.integers(1, 12))
def test_a_position_that_is_missed_is_one_that_was_listed(
    listed: list[int], prompt: int, stop: int
) -> None:
    found = missed(spans(listed), prompt, range(stop))
    reached = all(p in range(stop) for p in absolute(listed, prompt))
    assert found is None or found in listed
    if not reached and found is None:
        assert any(p < 0 for p in listed), "the last ones of a prompt that has fewer"
    assert not reached or found is None


@given(st.lists(LISTED, max_size=4))
def test_as_many_meet_as_are_at_one_position(several: list[list[int]]) -> None:
    counts = [
        Counter(p for one in several for p in set(one) if (p < 0) == from_end)
        for from_end in (False, True)
    ]
    expected = sum(max(c.values(), default=0) for c in counts)
    assert most_at_once(spans(one) for one in several) == expected


@pytest.mark.parametrize(
    "raw",
    [
        "last_prompt",
        "all_prompt",
        "all_generated",
        {"last": 3},
        [0, 4, -2],
        {"ranges": [[2, 400], [-80, -4]]},
    ],
)
def test_they_are_described_as_they_are_written(raw: Any) -> None:
    parsed = parse_positions(raw, "positions")
    assert parse_positions(describe(parsed), "positions") == parsed


def test_all_is_everywhere() -> None:
    assert parse_positions("all", "positions") is None
    assert describe(None) is None


def test_many_positions_cost_no_more_than_a_few() -> None:
    parsed = parse_positions({"last": 10**9}, "positions")
    assert parsed is not None and len(parsed) == 1
    assert within(parsed, 5, 0, 100) == set(range(5))

# SPDX-License-Identifier: Apache-2.0
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.residual.spans import (
    NAMED,
    counts_back,
    describe_positions,
    last_of,
    merged,
    missed,
    most_at_once,
    selected,
    spans_of,
)

lists = st.lists(st.integers(-12, 20), min_size=1, max_size=12)
prompts = st.integers(0, 10)


@given(positions=lists, prompt=prompts, start=st.integers(0, 15), n=st.integers(0, 9))
def test_spans_select_what_a_list_selects(
    positions: list[int], prompt: int, start: int, n: int
) -> None:
    spans = spans_of(positions)
    absolute = {p if p >= 0 else prompt + p for p in positions}
    expected = sorted(p for p in absolute if start <= p < start + n)
    assert selected(spans, prompt, start, start + n) == expected
    assert last_of(spans, prompt) == max(absolute)
    assert describe_positions(spans) == sorted(set(positions))


@given(positions=lists, prompt=prompts, start=st.integers(0, 15), n=st.integers(0, 9))
def test_a_position_outside_is_found_where_there_is_one(
    positions: list[int], prompt: int, start: int, n: int
) -> None:
    spans, possible = spans_of(positions), range(start, start + n)
    outside = {p for p in positions if (p if p >= 0 else prompt + p) not in possible}
    found = missed(spans, prompt, possible)
    some = len(outside) < len(set(positions))
    if counts_back(spans) and some:
        assert found is None
    else:
        assert (found is None) == (not outside)
        assert found is None or found in outside


def test_the_last_of_a_prompt_cost_nothing_however_many() -> None:
    spans = ((-(2**30), 0),)
    assert selected(spans, 2**31, 2**31 - 3, 2**31 + 5) == [*range(2**31 - 3, 2**31)]
    assert describe_positions(spans) == {"last": 2**30}
    ranges = {"ranges": [[0, 4999], [7000, 7000]]}
    assert describe_positions(((0, 5000), (7000, 7001))) == ranges
    assert describe_positions(NAMED["all_prompt"]) == "all_prompt"
    assert missed(spans, 10, range(10)) is None


@given(st.lists(lists, max_size=4))
def test_as_many_meet_as_are_at_one_position(several: list[list[int]]) -> None:
    counts = [
        Counter(p for one in several for p in set(one) if (p < 0) == from_end)
        for from_end in (False, True)
    ]
    expected = sum(max(c.values(), default=0) for c in counts)
    assert most_at_once(spans_of(one) for one in several) == expected


@given(st.lists(st.tuples(st.integers(-9, 9), st.integers(1, 4)), min_size=1))
def test_spans_that_meet_become_one(given_spans: list[tuple[int, int]]) -> None:
    kept = [(a, a + n) for a, n in given_spans if a >= 0 or a + n <= 0]
    expected = spans_of(p for first, stop in kept for p in range(first, stop))
    assert merged(kept) == expected

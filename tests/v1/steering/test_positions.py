# SPDX-License-Identifier: Apache-2.0
from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.steering.positions import (
    counts_back,
    last_of,
    missed,
    selected,
    spans_of,
    told,
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
    assert told(spans) == sorted(set(positions))


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
    assert told(spans) == {"last": 2**30}
    assert told(((0, 5000), (7000, 7001))) == {"ranges": [[0, 4999], [7000, 7000]]}
    assert missed(spans, 10, range(10)) is None

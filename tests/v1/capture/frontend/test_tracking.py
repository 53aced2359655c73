# SPDX-License-Identifier: Apache-2.0
from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.capture.frontend.tracking import HeldBytes, Tracked

NAMES = ("inline", "other")
sizes = st.dictionaries(st.sampled_from(NAMES), st.integers(0, 100))
steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 3), sizes),
        st.tuples(st.just("abort"), st.integers(0, 3), st.none()),
        st.tuples(st.just("drop"), st.integers(0, 3), st.none()),
    ),
    max_size=30,
)


@given(steps)
def test_the_sums_are_those_over_all_requests(steps: list[tuple]) -> None:
    held, tracked = HeldBytes(), {number: Tracked() for number in range(4)}
    for what, number, given_sizes in steps:
        if number not in tracked:
            continue
        if what == "put":
            held.put(tracked[number], given_sizes)
        elif what == "abort":
            held.abort(tracked[number])
        else:
            held.drop(tracked.pop(number))
        for name in NAMES:
            for aborted in (False, True):
                expected = sum(
                    one.held.get(name, 0)
                    for one in tracked.values()
                    if one.aborted == aborted
                )
                assert held.of(name, aborted) == expected

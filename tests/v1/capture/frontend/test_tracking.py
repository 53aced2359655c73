# SPDX-License-Identifier: Apache-2.0
from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.capture.frontend.request_tracker import HeldBytes

NAMES = ("inline", "other")
STATES = ("reserved", "running", "aborted", "unsent")
sizes = st.dictionaries(st.sampled_from(NAMES), st.integers(0, 100))
steps = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 3), st.sampled_from(STATES), sizes),
        st.tuples(st.integers(0, 3), st.none(), st.none()),
    ),
    max_size=30,
)


@given(steps)
def test_the_sums_are_those_over_all_requests(steps: list[tuple]) -> None:
    held, known = HeldBytes(), {}
    for number, state, given_sizes in steps:
        if state is None:
            held.drop(number)
            known.pop(number, None)
        else:
            held.put(number, state, given_sizes)
            known[number] = state, given_sizes
        for name in NAMES:
            expected = {
                one: sum(size.get(name, 0) for at, size in known.values() if at == one)
                for one in STATES
            }
            assert {one: held.of(name, one) for one in STATES} == expected
            assert held.of(name, *STATES) == sum(expected.values())

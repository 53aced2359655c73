# SPDX-License-Identifier: Apache-2.0
from hypothesis import given
from hypothesis import strategies as st

from vllm.steering.extract import CONSUMER, in_groups

HELD = CONSUMER["params"]["max_inflight_bytes"]


@given(
    texts=st.lists(st.text(min_size=1, max_size=9), min_size=1, max_size=150),
    per_token=st.sampled_from([0, 1, HELD // 20, HELD // 3, 2 * HELD]),
)
def test_no_group_holds_more_than_may_be_in_flight(
    texts: list[str], per_token: int
) -> None:
    groups = [list(group) for group in in_groups(texts, per_token)]
    assert [text for group in groups for text in group] == texts
    for group in groups:
        size = sum(len(text.encode()) for text in group) * per_token
        assert 1 <= len(group) <= 64
        assert size <= HELD or len(group) == 1


def test_groups_are_no_smaller_than_they_must_be() -> None:
    assert [len(group) for group in in_groups(["a"] * 130, 0)] == [64, 64, 2]
    assert [len(group) for group in in_groups(["abc"] * 4, HELD // 9)] == [2, 2]


def test_a_chat_counts_with_all_its_messages() -> None:
    chat = [{"role": "user", "content": "x" * 100}] * 3
    groups = in_groups([chat, chat], HELD // 400)
    assert len(list(groups)) == 2

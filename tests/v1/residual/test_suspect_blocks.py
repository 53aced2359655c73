# SPDX-License-Identifier: Apache-2.0
"""No request gets a block that may contain NaN of another request uncleared."""

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.residual.suspect_blocks import SuspectBlocks

NUM_BLOCKS = 6


def request(name: str, steered: bool = False, embedded: bool = False) -> Any:
    params = SimpleNamespace(_steering=object() if steered else None, _hooks=None)
    embeds = object() if embedded else None
    return SimpleNamespace(
        request_id=name, sampling_params=params, prompt_embeds=embeds
    )


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "steered", "embedded", "end", "slide", "global"]),
        st.integers(0, 3),
        st.integers(1, 3),
    ),
    max_size=40,
)


@given(STEPS)
def test_no_block_is_passed_on_as_it_was_left(
    steps: list[tuple[str, int, int]],
) -> None:
    suspects = SuspectBlocks(clears_all=False)
    free, dirty = list(range(1, 1 + NUM_BLOCKS)), set()
    live: dict[int, tuple[Any, list[int]]] = {}
    shared = False
    for what, who, count in steps:
        if what == "global":
            shared = not shared
        elif what in ("begin", "steered", "embedded") and who not in live:
            one = request(str(who), what == "steered", what == "embedded")
            suspects.begin(one, shared)
            live[who] = (one, [])
        elif what == "end" and who in live:
            one, blocks = live.pop(who)
            suspects.end(one, [blocks])
            free += blocks
        elif what == "slide" and who in live:  # out of its sliding window
            one, blocks = live[who]
            free += blocks[:1]
            del blocks[:1]
        if shared:
            suspects.begin_all(one for one, _ in live.values())
        new = []
        for _, blocks in live.values():
            taken = free[:count]
            del free[:count]
            blocks += taken
            new += taken
        dirty -= set(suspects.to_clear(new))
        for one, blocks in live.values():
            # Its own vectors may overflow at any step, in its own blocks only.
            if suspects.concerns(one):
                dirty |= set(blocks)
            else:
                assert not dirty & set(blocks)


def test_blocks_of_unsteered_traffic_are_never_cleared() -> None:
    suspects = SuspectBlocks(clears_all=False)
    one = request("a")
    suspects.begin(one, for_all=False)
    assert suspects.to_clear([1, 2]) == [] and not suspects.any_running
    suspects.end(one, [[1, 2]])
    assert suspects.to_clear([1, 2]) == []


def test_what_upstream_clears_anyway_is_cleared() -> None:
    assert SuspectBlocks(clears_all=True).to_clear([3, 4]) == [3, 4]

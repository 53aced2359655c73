# SPDX-License-Identifier: Apache-2.0
from collections.abc import Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.capture.staging.request_pages import RequestPages, gaps
from vllm.v1.residual.row_blocks import Block, LocalGroup

WIDTH = 4
PROMPT = 20
TAPS = ((0, "post_block"), (1, "post_block"))
BLOCK = Block((0, 1), {}, (), (), 0)


class Source:
    """Allocates as long as there is memory."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        if shape[1] > self.rows:
            return None
        self.rows -= shape[1]
        return torch.zeros(*shape, dtype=dtype)


def opened(rows: int, least_rows: int = 1) -> RequestPages:
    least = least_rows * WIDTH * 4
    pages = RequestPages(Source(rows), WIDTH, torch.float32, least)
    pages.open("a", PROMPT, [LocalGroup(TAPS, (0, 1), ((0, PROMPT + 9),), ())])
    return pages


@given(st.lists(st.integers(1, 8), min_size=1))
def test_chunks_of_a_prompt_lie_behind_each_other(chunks: list[int]) -> None:
    pages, position = opened(PROMPT), 0
    memories = []
    for size in chunks:
        size = min(size, PROMPT - position)
        if size == 0:
            break
        place = pages.place(BLOCK, ("a", 0, position, size, 0))
        assert place is not None
        assert place[0].shape == (2, PROMPT, WIDTH) and place[1] == position
        memories.append(place[0])
        position += size
    assert all(memory is memories[0] for memory in memories)


def test_what_is_computed_again_gets_other_memory() -> None:
    pages = opened(2 * PROMPT)
    first = pages.place(BLOCK, ("a", 0, 0, 8, 0))
    again = pages.place(BLOCK, ("a", 0, 0, 8, 0))
    assert first is not None and again is not None and first[0] is not again[0]
    further = pages.place(BLOCK, ("a", 0, 8, 8, 0))
    assert further is not None and further[0] is again[0] and further[1] == 8


def test_without_room_for_the_prompt_the_step_has_memory_of_its_own() -> None:
    pages = opened(8)
    place = pages.place(BLOCK, ("a", 0, 0, 8, 0))
    assert place is not None and place[0].shape == (2, 8, WIDTH)
    assert pages.place(BLOCK, ("a", 0, 8, 8, 0)) is None


def test_few_rows_at_either_end_of_a_long_prompt_lie_in_its_page() -> None:
    pages = opened(2 * PROMPT, least_rows=4)
    first = pages.place(BLOCK, ("a", 0, 0, 3, 0))
    second = pages.place(BLOCK, ("a", 0, 3, 15, 0))
    last = pages.place(BLOCK, ("a", 0, 18, 2, 0))
    assert first is not None and first[0].shape[1] == PROMPT
    assert second == (first[0], 3) and last == (first[0], 18)


def test_few_rows_go_another_way_if_no_long_run_follows() -> None:
    assert opened(PROMPT, least_rows=PROMPT + 1).place(BLOCK, ("a", 0, 0, 8, 0)) is None
    pages = opened(2 * PROMPT, least_rows=4)
    assert pages.place(BLOCK, ("a", 0, PROMPT - 3, 3, 0)) is None
    without_room = opened(PROMPT - 1, least_rows=4)
    assert without_room.place(BLOCK, ("a", 0, 0, 3, 0)) is None
    assert without_room.place(BLOCK, ("a", 0, 3, 8, 0)) is not None


def test_rows_past_the_prompt_do_not_go_on_in_its_memory() -> None:
    pages = opened(3 * PROMPT)
    first = pages.place(BLOCK, ("a", 0, 0, PROMPT, 0))
    drafts = pages.place(BLOCK, ("a", 0, PROMPT, 3, 0))
    assert first is not None and drafts is not None
    assert drafts[0] is not first[0] and drafts[0].shape[1] == 3


def test_a_request_that_has_ended_keeps_no_memory() -> None:
    pages = opened(2 * PROMPT)
    pages.place(BLOCK, ("a", 0, 0, 8, 0))
    pages.close("a")
    assert not pages._filling and not pages._prompts
    pages.close("a")


@given(st.sets(st.integers(0, 30)), st.integers(0, 31))
def test_gaps_are_what_is_not_covered(points: set[int], stop: int) -> None:
    covered = [(point, point + 1) for point in points if point < stop]
    rest = {i for first, last in gaps(covered, stop) for i in range(first, last)}
    assert rest == set(range(stop)) - points

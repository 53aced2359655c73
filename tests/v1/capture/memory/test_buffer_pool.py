# SPDX-License-Identifier: Apache-2.0
import gc
import threading
from errno import EMFILE
from unittest.mock import patch

import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.capture.memory.budget import HostBudget
from vllm.v1.capture.memory.buffer_pool import OWNER, SMALLEST, RowMemory, adjacent

WIDTH = 1024
KEPT = 64 * SMALLEST
LARGE = SMALLEST // (2 * WIDTH)
"""Number of bfloat16 rows whose memory is kept."""


def test_memory_returns_when_the_last_view_is_gone() -> None:
    memory = RowMemory(HostBudget(KEPT), SMALLEST)
    first = memory.empty((LARGE, WIDTH), torch.bfloat16)
    address, view = first.data_ptr(), first[3:5]
    del first
    gc.collect()
    other = memory.empty((LARGE, WIDTH), torch.bfloat16)
    assert other.data_ptr() != address, "a view was still held"
    del view
    gc.collect()
    again = memory.empty((LARGE, WIDTH), torch.bfloat16)
    assert again.data_ptr() == address


def test_no_more_is_taken_than_the_budget_allows() -> None:
    budget = HostBudget(3 * SMALLEST)
    memory = RowMemory(budget, SMALLEST)
    held = [memory.empty((LARGE, WIDTH), torch.bfloat16) for _ in range(8)]
    assert budget.by_owner() == {OWNER: 3 * SMALLEST}
    assert budget.overflow_bytes == 5 * SMALLEST
    addresses = {rows.data_ptr() for rows in held}
    assert len(addresses) == 8, "memory was given out twice"


def test_what_was_not_needed_for_a_while_is_given_back() -> None:
    budget = HostBudget(8 * SMALLEST)
    memory = RowMemory(budget, SMALLEST)
    held = [memory.empty((LARGE, WIDTH), torch.bfloat16) for _ in range(4)]
    memory.trim()
    del held
    gc.collect()
    memory.empty((LARGE, WIDTH), torch.bfloat16)
    memory.trim()
    assert budget.by_owner() == {OWNER: SMALLEST}, "only the first was needed since"
    memory.trim()
    assert budget.by_owner() == {}


def test_a_block_larger_than_a_segment_has_one_of_its_own() -> None:
    budget = HostBudget(KEPT)
    rows = RowMemory(budget, SMALLEST).empty((9 * LARGE, WIDTH), torch.bfloat16)
    rows.fill_(1)
    assert budget.by_owner() == {OWNER: 9 * SMALLEST} and bool((rows == 1).all())


def test_parts_are_joined() -> None:
    memory = RowMemory(HostBudget(KEPT), SMALLEST)
    parts = [torch.randn(2, LARGE, WIDTH) for _ in range(3)]
    assert torch.equal(memory.cat(parts), torch.cat(parts, 1))
    assert memory.cat(parts[:1]) is parts[0]


@given(
    st.lists(st.integers(1, 6), unique=True, min_size=1),
    st.integers(1, 3),
)
def test_adjacent_parts_are_joined_as_a_view(cuts: list[int], taps: int) -> None:
    whole = torch.randn(taps, 7, 5)
    sizes = torch.tensor([0, *sorted(cuts), 7]).diff().tolist()
    parts = whole.split(sizes, -2)
    joined = adjacent(parts)
    assert joined is not None and torch.equal(joined, whole)
    assert joined.data_ptr() == whole.data_ptr(), "it was copied"
    shifted = [*parts[1:], parts[0]]
    assert adjacent(shifted) is None
    memory = RowMemory(HostBudget(KEPT), SMALLEST)
    assert torch.equal(memory.cat(shifted), torch.cat(shifted, -2))
    assert adjacent([part.clone() for part in parts]) is None


def test_threads_never_share_memory_that_is_held() -> None:
    memory, wrong = RowMemory(HostBudget(KEPT), SMALLEST), []

    def work(value: int) -> None:
        for _ in range(200):
            rows = memory.empty((1, LARGE, WIDTH), torch.bfloat16).fill_(value)
            copied = memory.cat([rows[:, 1:], rows[:, :1]])
            if not (bool((rows == value).all()) and bool((copied == value).all())):
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_without_file_descriptors_rows_are_in_ordinary_memory() -> None:
    budget = HostBudget(KEPT)
    memory = RowMemory(budget, SMALLEST)
    with patch("os.memfd_create", side_effect=OSError(EMFILE, "too many")):
        rows = memory.empty((LARGE, WIDTH), torch.bfloat16)
    assert rows.shape == (LARGE, WIDTH)
    assert not budget.by_owner() and budget.overflow_bytes == SMALLEST

# SPDX-License-Identifier: Apache-2.0
import gc
import threading

import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.capture.memory.buffer_pool import SMALLEST, RowMemory, _rounded

WIDTH = 1024
KEPT = 64 * SMALLEST
LARGE = SMALLEST // (2 * WIDTH)
"""Rows of bfloat16 whose memory is kept."""


@given(st.integers(1, 1 << 34))
def test_memory_is_rounded_by_a_quarter_at_most(num_bytes: int) -> None:
    assert num_bytes <= _rounded(num_bytes) <= max(num_bytes * 5 // 4, num_bytes + 1)
    assert _rounded(_rounded(num_bytes)) == _rounded(num_bytes)


def test_memory_returns_when_the_last_view_is_gone() -> None:
    memory = RowMemory(KEPT)
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


def test_no_more_is_kept_than_is_allowed() -> None:
    memory = RowMemory(kept=3 * SMALLEST)
    held = [memory.empty((LARGE, WIDTH), torch.bfloat16) for _ in range(8)]
    del held
    gc.collect()
    assert memory._free_bytes == 3 * SMALLEST
    assert sum(len(slabs) for slabs in memory._free.values()) == 3


def test_what_was_not_needed_for_a_while_is_given_back() -> None:
    memory = RowMemory(kept=8 * SMALLEST)
    held = [memory.empty((LARGE, WIDTH), torch.bfloat16) for _ in range(4)]
    memory.trim()
    del held
    gc.collect()
    memory.trim()  # They were needed since the last time.
    assert memory._free_bytes == 4 * SMALLEST
    held = [memory.empty((LARGE, WIDTH), torch.bfloat16)]
    del held
    gc.collect()
    memory.trim()  # One of them was.
    assert memory._free_bytes == SMALLEST
    assert sum(len(slabs) for slabs in memory._free.values()) == 1


def test_parts_are_joined() -> None:
    memory = RowMemory(KEPT)
    parts = [torch.randn(2, LARGE, WIDTH) for _ in range(3)]
    assert torch.equal(memory.cat(parts, 1), torch.cat(parts, 1))
    assert memory.cat(parts[:1], 1) is parts[0]


def test_threads_never_share_memory_that_is_held() -> None:
    memory, wrong = RowMemory(KEPT), []

    def work(value: int) -> None:
        for _ in range(200):
            rows = memory.empty((LARGE, WIDTH), torch.bfloat16).fill_(value)
            copied = memory.cat([rows[:1], rows[1:]])
            if not (bool((rows == value).all()) and bool((copied == value).all())):
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong

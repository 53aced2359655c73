# SPDX-License-Identifier: Apache-2.0
import gc
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.capture.recycling import SMALLEST, RowMemory, _rounded

WIDTH = 1024
LARGE = SMALLEST // (2 * WIDTH)
"""Rows of bfloat16 whose memory is kept."""


@given(st.integers(1, 1 << 34))
def test_memory_is_rounded_by_a_quarter_at_most(num_bytes: int) -> None:
    assert num_bytes <= _rounded(num_bytes) <= max(num_bytes * 5 // 4, num_bytes + 1)
    assert _rounded(_rounded(num_bytes)) == _rounded(num_bytes)


@pytest.mark.parametrize("rows", [0, 1, LARGE, 3 * LARGE])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_copy_is_equal_and_its_own(rows: int, dtype: torch.dtype) -> None:
    memory = RowMemory()
    source = torch.randn(2, rows, WIDTH).to(dtype)
    expected = source.clone()
    copied = memory.copy(source.transpose(0, 1))
    source.zero_()
    assert copied.is_contiguous()
    assert torch.equal(copied, expected.transpose(0, 1))


def test_memory_returns_when_the_last_view_is_gone() -> None:
    memory = RowMemory()
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


def test_parts_are_joined() -> None:
    memory = RowMemory()
    parts = [torch.randn(2, LARGE, WIDTH) for _ in range(3)]
    assert torch.equal(memory.cat(parts, 1), torch.cat(parts, 1))
    assert memory.cat(parts[:1], 1) is parts[0]


def test_threads_never_share_memory_that_is_held() -> None:
    memory, wrong = RowMemory(), []

    def work(value: int) -> None:
        for _ in range(200):
            rows = memory.empty((LARGE, WIDTH), torch.bfloat16).fill_(value)
            copied = memory.copy(rows)
            if not (bool((rows == value).all()) and bool((copied == value).all())):
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong

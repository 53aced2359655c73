# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.capture.memory import parallel_copy
from vllm.v1.capture.memory.parallel_copy import copy_all, shares


@given(
    st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 7)),
    st.permutations([0, 1, 2]),
    st.integers(1, 5),
)
def test_any_order_of_rows_is_copied_by_any_number_of_threads(
    shape: tuple[int, int, int], order: list[int], threads: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel_copy, "num_threads", lambda: threads)
        patch.setattr(parallel_copy, "PIECE_BYTES", 16)
        parallel_copy._pool.cache_clear()
        source = torch.randn(*shape, 6).to(torch.bfloat16).permute(*order, 3)
        target = torch.zeros(source.shape, dtype=torch.bfloat16)
        copy_all([(target, source)])
        assert torch.equal(target, source)
        again = [torch.zeros_like(target) for _ in range(3)]
        copy_all([(one, source) for one in again])
        assert all(torch.equal(one, source) for one in again)
    parallel_copy._pool.cache_clear()


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 60))
def test_each_thread_gets_about_as_much(rows: list[int], size: int) -> None:
    copies = [(torch.zeros(1, n, 2).byte(), torch.zeros(1, n, 2).byte()) for n in rows]
    parts = shares(copies, size)
    lengths = [sum(target.nbytes for target, _ in part) for part in parts]
    assert sum(lengths) == 2 * sum(rows)
    assert all(size <= length for length in lengths[:-1])
    largest = max(target.nbytes for part in parts for target, _ in part)
    assert largest <= size + 2 and all(length < size + largest for length in lengths)

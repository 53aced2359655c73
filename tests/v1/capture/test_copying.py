# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.capture import copying
from vllm.v1.capture.copying import bytes_of, copy_all, shares


@given(
    st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 7)),
    st.permutations([0, 1, 2]),
    st.integers(1, 5),
)
def test_any_order_of_rows_is_copied_by_any_number_of_threads(
    shape: tuple[int, int, int], order: list[int], threads: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying, "num_threads", lambda: threads)
        patch.setattr(copying, "PIECE_BYTES", 16)
        copying._pool.cache_clear()
        source = torch.randn(*shape, 6).to(torch.bfloat16).permute(*order, 3)
        target = torch.zeros(source.shape, dtype=torch.bfloat16)
        copy_all([(bytes_of(target), bytes_of(source))])
        assert torch.equal(target, source)
        again = [torch.zeros_like(target) for _ in range(3)]
        copy_all([(bytes_of(one), bytes_of(source)) for one in again])
        assert all(torch.equal(one, source) for one in again)
    copying._pool.cache_clear()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_bytes_are_the_rows_own_memory(dtype: torch.dtype) -> None:
    rows = torch.zeros(3, 5, dtype=dtype)
    found = bytes_of(rows[1:])
    assert found.shape == (2, 5 * dtype.itemsize)
    found[0] = np.frombuffer(bytes_of(torch.ones(1, 5, dtype=dtype)), dtype=np.uint8)
    assert rows.tolist() == [[0.0] * 5, [1.0] * 5, [0.0] * 5]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 60))
def test_each_thread_gets_about_as_much(rows: list[int], size: int) -> None:
    pairs = [
        (np.zeros((1, n, 2), np.uint8), np.zeros((1, n, 2), np.uint8)) for n in rows
    ]
    parts = shares(pairs, size)
    lengths = [sum(target.nbytes for target, _ in part) for part in parts]
    assert sum(lengths) == 2 * sum(rows)
    assert all(size <= length for length in lengths[:-1])
    largest = max(target.nbytes for part in parts for target, _ in part)
    assert largest <= size + 2 and all(length < size + largest for length in lengths)

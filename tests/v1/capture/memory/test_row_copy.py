# SPDX-License-Identifier: Apache-2.0
"""The compiled copy and torch's copy give the same result."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.capture.memory import buffer_pool
from vllm.v1.capture.memory.buffer_pool import RowCopy, copy_rows
from vllm.v1.residual import native

WIDTH, ROWS = 3, 60


@contextmanager
def copying_threads(number: int) -> Iterator[pytest.MonkeyPatch]:
    """Copies of a few bytes use this number of threads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buffer_pool, "copy_threads", lambda: number)
        patch.setattr(buffer_pool, "PIECE_BYTES", 16)
        yield patch


@st.composite
def some_copies(draw: st.DrawFn) -> list[RowCopy]:
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float32]))
    rows = torch.randn(ROWS + 5, WIDTH).to(dtype)
    source = rows[draw(st.integers(0, 5)) :]
    copies = []
    for _ in range(draw(st.integers(0, 5))):
        taps, num_rows = draw(st.integers(1, 3)), draw(st.integers(1, 5))
        place, room = draw(st.integers(0, 3)), draw(st.integers(0, 2))
        target = torch.zeros(taps, place + num_rows + room, WIDTH, dtype=source.dtype)
        first = WIDTH * draw(st.integers(0, 20))
        tap_stride = WIDTH * draw(st.integers(1, 8))
        row_stride = WIDTH * draw(st.sampled_from([1, 1, 3, 5]))
        copy = target, place, source, first, num_rows, tap_stride, row_stride
        copies.append(RowCopy(*copy))
    return copies


@given(some_copies(), st.integers(1, 4), st.booleans())
def test_each_row_is_copied_to_its_place(
    copies: list[RowCopy], threads: int, compiled: bool
) -> None:
    expected = []
    for target, place, source, first, num_rows, tap_stride, row_stride in copies:
        wanted = torch.zeros_like(target)
        for tap in range(len(target)):
            for row in range(num_rows):
                at = first + tap * tap_stride + row * row_stride
                wanted[tap, place + row] = source.flatten()[at : at + WIDTH]
        expected.append(wanted)
    assert native.library() is not None, "fork build leaves the native library out here"
    with copying_threads(threads) as patch:
        if not compiled:
            patch.setattr(buffer_pool, "library", lambda: None)
        copy_rows(copies)
    for copy, wanted in zip(copies, expected, strict=True):
        assert torch.equal(copy.target, wanted)


def test_rows_that_would_overlap_are_refused() -> None:
    library: Any = native.library()
    with pytest.raises(ValueError, match="would overlap"):
        library.gather_rows([(0, 4, 0, 0, 0, 2, 2)], 3, 1)


@given(
    st.tuples(st.integers(1, 4), st.integers(1, 5)),
    st.permutations([0, 1]),
    st.sampled_from([torch.bfloat16, torch.float32]),
    st.integers(1, 5),
)
def test_any_order_of_rows_is_joined_by_any_number_of_threads(
    shape: tuple[int, int], order: list[int], dtype: torch.dtype, threads: int
) -> None:
    with copying_threads(threads):
        part = torch.randn(*shape, 6).to(dtype).permute(*order, 2)
        parts = [part, 2 * part, part]
        assert torch.equal(buffer_pool.ROWS.cat(parts), torch.cat(parts, 1))

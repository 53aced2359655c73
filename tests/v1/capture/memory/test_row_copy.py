# SPDX-License-Identifier: Apache-2.0
"""The compiled copy and torch's copy give the same result."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.capture import native
from vllm.v1.capture.memory import row_copy
from vllm.v1.capture.memory.row_copy import RowCopy, copy_rows

WIDTH, ROWS = 3, 60


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
        first, apart = draw(st.integers(0, 20)), draw(st.integers(1, 8))
        distance = draw(st.sampled_from([1, 1, 3, 5]))
        copy = target, place, source, first, num_rows, apart, distance
        copies.append(RowCopy(*copy))
    return copies


@given(some_copies(), st.integers(1, 4), st.booleans())
def test_each_row_lands_where_it_must(
    copies: list[RowCopy], threads: int, compiled: bool
) -> None:
    expected = []
    for target, place, source, first, num_rows, apart, distance in copies:
        wanted = torch.zeros_like(target)
        for tap in range(len(target)):
            for row in range(num_rows):
                at = first + tap * apart + row * distance
                wanted[tap, place + row] = source[at]
        expected.append(wanted)
    assert native.library() is not None, "fork build leaves the native library out here"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_copy, "threads_for", lambda num_bytes: threads)
        if not compiled:
            patch.setattr(row_copy, "library", lambda: None)
        copy_rows(copies)
    for copy, wanted in zip(copies, expected, strict=True):
        assert torch.equal(copy.target, wanted)


def test_rows_that_would_lie_over_others_are_refused() -> None:
    library: Any = native.library()
    with pytest.raises(ValueError, match="lie over"):
        library.gather_rows([(0, 4, 0, 0, 0, 2, 2)], 3, 1)

# SPDX-License-Identifier: Apache-2.0
"""A piece describes the places of its rows, at equal distances."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.capture.dispatch.row_spans import Piece, Span
from vllm.v1.capture.memory.row_copy import copy_rows

ROWS, WIDTH = 400, 2
MEMORY = torch.arange(ROWS).float()[:, None].repeat(1, WIDTH)
"""Memory whose rows contain their index."""


def span(num_steps: int, step: int, num_rows: int) -> Span:
    """Steps up to `step`, of `num_rows` rows each."""
    return Span(num_steps, step, step - 1, MEMORY, num_rows)


def places(piece: Piece, taps: int) -> list[list[float]]:
    """The places of the rows, by tap."""
    rows = torch.zeros(taps, piece.num_rows + 2, WIDTH)
    copy_rows([piece.copy_to(rows, 1)])
    assert not rows[:, [0, -1]].any(), "nothing else is written"
    return rows[:, 1:-1, 0].tolist()


@given(
    st.integers(1, 4),  # steps
    st.sampled_from([8, 11]),  # rows of each
    st.integers(0, 3),  # the request's place among them
    st.sampled_from([4, 5]),  # from tap to tap
    st.integers(1, 2),  # taps
)
def test_a_piece_has_each_row_where_it_is(
    num_steps: int, num_rows: int, seat: int, apart: int, taps: int
) -> None:
    piece = Piece(span(num_steps, 9, num_rows), 20, 1, seat, apart, taps)
    assert piece.num_rows == piece.num_steps == num_steps
    assert places(piece, taps) == [
        [seat + step * num_rows + tap * apart for step in range(num_steps)]
        for tap in range(taps)
    ]


def test_rows_of_a_prompt_are_no_part_of_what_follows() -> None:
    piece = Piece(span(1, 0, 8), 0, 4, 0, 4, 2)
    assert places(piece, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    after = Piece(span(1, 1, 8), 4, 1, 8, 4, 2)
    assert not after.goes_on(piece)
    assert Piece(span(2, 3, 8), 5, 1, 100, 4, 2).goes_on(after)

# SPDX-License-Identifier: Apache-2.0
"""Rows that lie at equal distances are one piece; others are not taken for one."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.capture.pieces import Piece, Span

ROWS, WIDTH = 400, 2
MEMORY = torch.arange(ROWS).float()[:, None].repeat(1, WIDTH)
"""Each row says where it is."""


def span(num_steps: int, step: int, num_rows: int) -> Span:
    """Steps up to `step`, of `num_rows` rows each."""
    return Span(num_steps, step, step - 1, MEMORY, num_rows)


def places(piece: Piece) -> list[list[float]]:
    """Where the rows are, by tap."""
    staged = piece.staged
    assert staged.shape[1:] == (piece.num_rows, WIDTH)
    return staged[:, :, 0].tolist()


@given(
    st.lists(
        st.tuples(
            st.integers(1, 3),  # steps
            st.sampled_from([5, 5, 5, 8]),  # rows of each
            st.sampled_from([0, 0, 0, 1]),  # the request's place among them
            st.sampled_from([0, 0, 0, 2]),  # rows of other steps before
            st.sampled_from([0, 0, 0, 1, -1]),  # positions that are skipped
            st.sampled_from([2, 2, 2, 1]),  # from tap to tap
        ),
        min_size=1,
        max_size=10,
    )
)
def test_pieces_have_each_row_where_it_is(spans: list[tuple[int, ...]]) -> None:
    pieces: list[Piece] = []
    expected: list[tuple[int, int, int]] = []
    at, position, step = 0, 0, 0
    for num_steps, num_rows, seat, gap, skipped, apart in spans:
        at += gap
        position += skipped
        step += num_steps
        found = span(num_steps, step - 1, num_rows)
        first = at + seat
        if not (pieces and pieces[-1].extend(found, position, first, apart)):
            pieces.append(Piece(found, position, 1, first, apart, 2))
        for number in range(num_steps):
            place = first + number * num_rows
            expected.append((position + number, place, place + apart))
        at, position = at + num_steps * num_rows, position + num_steps
    rows = [
        (piece.start + i, int(first), int(second))
        for piece in pieces
        for i, (first, second) in enumerate(zip(*places(piece), strict=True))
    ]
    assert rows == expected
    assert sum(piece.num_steps for piece in pieces) == step


def test_rows_at_equal_distances_are_one_piece() -> None:
    piece = Piece(span(1, 0, 7), 10, 1, 3, 2, 2)
    assert piece.extend(span(1, 4, 9), 11, 13, 2), "the first two may be any apart"
    assert (piece.step, piece.step_before) == (4, 0)
    assert piece.extend(span(3, 9, 10), 12, 23, 2)
    assert (piece.step, piece.step_before) == (9, 8)
    assert places(piece) == [[3, 13, 23, 33, 43], [5, 15, 25, 35, 45]]


def test_rows_of_a_prompt_are_no_part_of_what_follows() -> None:
    piece = Piece(span(1, 0, 8), 0, 4, 0, 4, 2)
    assert not piece.extend(span(1, 1, 8), 4, 8, 4)
    after = Piece(span(1, 1, 8), 4, 1, 8, 4, 2)
    assert not after.goes_on(piece)
    assert Piece(span(2, 3, 8), 5, 1, 100, 4, 2).goes_on(after)


def test_parts_of_one_step_stay_apart() -> None:
    piece = Piece(span(1, 0, 8), 0, 1, 0, 4, 2)
    assert not piece.extend(span(1, 0, 8), 1, 1, 4)

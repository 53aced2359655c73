# SPDX-License-Identifier: Apache-2.0
"""Pieces describe rows at constant strides; a buffer joins them in order."""

from itertools import count

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.v1.capture._strategies import rows_of_step
from vllm.v1.capture.dispatch.row_buffer import (
    GATHERED,
    Piece,
    RowBuffer,
    RowLedger,
    Rows,
)
from vllm.v1.capture.memory.buffer_pool import ROWS, RowCopy, copy_rows

MEMORY = torch.arange(400).float()[:, None].repeat(1, 2)
"""Memory whose rows contain their index."""


def of_prompt(start: int, num_rows: int, step: int, first: int, stride: int) -> Piece:
    """Rows of one step, at taps that are `stride` rows apart."""
    return Piece(start, num_rows, 1, step, MEMORY, first, stride, 1, 2)


def of_steps(
    start: int, num_steps: int, step: int, first: int, stride: int, step_rows: int
) -> Piece:
    """A row of each of some steps up to `step`, which have `step_rows` rows each."""
    size = num_steps, num_steps
    return Piece(start, *size, step, MEMORY, first, stride, step_rows, 2)


def places(piece: Piece, taps: int) -> list[list[float]]:
    """The places of the rows, by tap."""
    rows = torch.zeros(taps, piece.num_rows + 2, 2)
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
def test_a_piece_has_the_place_of_each_row(
    num_steps: int, num_rows: int, place: int, tap_stride: int, taps: int
) -> None:
    piece = of_steps(20, num_steps, 9, place, tap_stride, num_rows)
    assert places(piece, taps) == [
        [place + step * num_rows + tap * tap_stride for step in range(num_steps)]
        for tap in range(taps)
    ]


def test_rows_of_a_prompt_are_not_continued() -> None:
    piece = of_prompt(0, 4, 0, 0, 4)
    assert places(piece, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    after = of_prompt(4, 1, 1, 8, 4)
    assert not after.continues(piece)
    assert of_steps(5, 2, 3, 100, 4, 8).continues(after)


TAPS, WIDTH = 2, 3


def put(gathering: RowBuffer, start: int, num_rows: int, most: int) -> Rows:
    """Put rows that contain their position and their tap's number."""
    rows = torch.arange(start, start + num_rows).float().repeat(TAPS, 1)
    rows = torch.stack([rows, rows, torch.arange(TAPS)[:, None].expand_as(rows)], -1)
    copies: list[RowCopy] = []
    flat = rows.flatten(0, 1)
    piece = Piece(start, num_rows, 1, 0, flat, 0, num_rows, 1, WIDTH)
    (rows,) = gathering.gather([piece], start + most, copies)
    copy_rows(copies)
    return rows


def joined(parts: list[Rows]) -> torch.Tensor:
    return ROWS.cat([part.tensor for part in parts])


def check(rows: torch.Tensor, positions: list[int]) -> None:
    for tap in range(TAPS):
        assert rows[tap].tolist() == [[p, p, tap] for p in positions]


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=12),
    st.booleans(),
    st.integers(1, 20),
)
def test_rows_are_joined_in_order(sizes: list[int], together: bool, most: int) -> None:
    gathering, parts, start = RowBuffer(TAPS, torch.float32, together), [], 0
    for size in sizes:
        parts.append(put(gathering, start, size, max(most - start, 1)))
        start += size
    check(joined(parts), list(range(start)))
    for part in parts:
        check(part.tensor, list(range(part.start, part.stop)))


def test_rows_that_come_one_by_one_are_not_copied_again() -> None:
    gathering = RowBuffer(TAPS, torch.float32, together=True)
    parts = [put(gathering, position, 1, 100 - position) for position in range(100)]
    rows = joined(parts)
    assert rows.data_ptr() == parts[0].memory.data_ptr()
    assert parts[0].memory.shape[1] == 100, "as many as the request may have"
    assert all(row.is_contiguous() for row in rows)


def test_a_request_without_a_bound_takes_no_more_than_some_rows_at_a_time() -> None:
    gathering = RowBuffer(TAPS, torch.float32, together=True)
    assert put(gathering, 0, 1, 1 << 40).memory.shape[1] == GATHERED


def test_rows_that_leave_at_once_have_memory_of_their_own() -> None:
    gathering = RowBuffer(TAPS, torch.float32, together=False)
    parts = [put(gathering, position, 1, 100) for position in range(3)]
    assert {part.memory.shape[1] for part in parts} == {1}
    check(joined(parts), [0, 1, 2])


def test_an_invalid_row_between_others_is_left_out() -> None:
    gathering = RowBuffer(TAPS, torch.float32, together=True)
    first = put(gathering, 4, 2, 100)
    put(gathering, 6, 1, 98)
    again = put(gathering, 6, 2, 98)
    check(joined([first, again]), [4, 5, 6, 7])


STEPS = count()


def rows_at(start: int, *values: float, step: int | None = None) -> Rows:
    """Rows of a separate step, or of the given step."""
    tensor = torch.tensor([[[value] for value in values]])
    return rows_of_step(start, tensor, next(STEPS) if step is None else step)


def delivered(handed: list[Rows]) -> list[tuple[int, float]]:
    return [
        (rows.start + i, rows.tensor[0, i, 0].item())
        for rows in handed
        for i in range(rows.stop - rows.start)
    ]


def test_rows_of_a_step_each_are_settled_but_for_the_last() -> None:
    ledger, tensor = RowLedger(), torch.tensor([[[3.0], [4.0], [5.0]]])
    assert delivered(ledger.add(rows_at(2, 2.0, step=1))) == []
    settled = ledger.add(Rows(3, 3, tensor, 0, step=9, step_before=7))
    assert delivered(settled) == [(2, 2.0), (3, 3.0), (4, 4.0)]
    assert [rows.step for rows in settled] == [1, 7]
    (last,) = ledger.finish(6)
    assert delivered([last]) == [(5, 5.0)] and last.step == 9


def test_a_part_of_a_step_says_nothing_of_the_part_before_it() -> None:
    ledger = RowLedger()
    assert ledger.add(rows_at(3, -1.0, step=1)) == []
    assert ledger.add(rows_at(5, -1.0, step=1)) == []  # drafts, both rejected
    assert ledger.add(rows_at(3, 3.0, step=2)) == []
    assert delivered(ledger.finish(4)) == [(3, 3.0)]

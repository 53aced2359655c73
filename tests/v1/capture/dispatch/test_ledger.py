# SPDX-License-Identifier: Apache-2.0
from itertools import count

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.v1.capture._simulation import Life, lives, standing, void_after_the_end
from tests.v1.capture._strategies import positions, ranges
from vllm.v1.capture.dispatch.ledger import RowLedger, Rows
from vllm.v1.residual.spans import overlap

STEPS = count()


def rows_at(start: int, *values: float, step: int | None = None) -> Rows:
    """Rows of a separate step, or of the given step."""
    tensor = torch.tensor([[[value] for value in values]])
    return Rows.of(start, tensor, next(STEPS) if step is None else step)


def delivered(handed: list[Rows]) -> list[tuple[int, float]]:
    return [
        (rows.start + i, rows.tensor[0, i, 0].item())
        for rows in handed
        for i in range(rows.stop - rows.start)
    ]


def test_a_row_is_held_until_the_next_position_is_computed() -> None:
    ledger = RowLedger()
    assert ledger.add(rows_at(0, 0.0, 1.0)) == []
    assert delivered(ledger.add(rows_at(2, 2.0))) == [(0, 0.0), (1, 1.0)]
    assert delivered(ledger.finish(3)) == [(2, 2.0)]


def test_a_rejected_draft_is_replaced_by_the_row_that_stands() -> None:
    ledger = RowLedger()
    ledger.add(rows_at(3, 3.0, -1.0, -1.0))
    assert delivered(ledger.add(rows_at(4, 4.0))) == [(3, 3.0)]
    assert delivered(ledger.finish(5)) == [(4, 4.0)]


def test_a_row_past_the_end_is_dropped() -> None:
    ledger = RowLedger()
    ledger.add(rows_at(3, 3.0))
    handed = ledger.add(rows_at(4, -1.0))
    assert delivered(handed + ledger.finish(4)) == [(3, 3.0)]


def test_a_row_that_was_handed_on_is_not_handed_on_again() -> None:
    ledger = RowLedger()
    ledger.add(rows_at(0, 0.0, 1.0))
    first = ledger.add(rows_at(2, 2.0))
    again = ledger.add(rows_at(0, 0.0, 1.0, 2.0))  # resumed after a preemption
    assert delivered(first) == [(0, 0.0), (1, 1.0)]
    assert delivered(again + ledger.finish(3)) == [(2, 2.0)]


def test_a_part_of_a_step_says_nothing_of_the_part_before_it() -> None:
    ledger = RowLedger()
    assert ledger.add(rows_at(3, -1.0, step=1)) == []
    assert ledger.add(rows_at(5, -1.0, step=1)) == []  # drafts, both rejected
    assert ledger.add(rows_at(3, 3.0, step=2)) == []
    assert delivered(ledger.finish(4)) == [(3, 3.0)]


@given(st.data(), lives())
def test_selected_rows_are_handed_on_once_and_in_order(
    data: st.DataObject, life: Life
) -> None:
    wanted = data.draw(ranges(life.num_prompt_tokens, life.stop + 3))
    ledger, handed = RowLedger(), []
    for number, step in enumerate(life.steps):
        for start, stop in overlap(wanted, step.start, step.start + len(step.values)):
            handed += ledger.add(Rows.of(start, step.rows(start, stop)[None], number))
    handed += ledger.finish(life.stop)
    counted = [pair for pair in delivered(handed) if pair[0] < life.stop]
    expected = [(p, float(p)) for p in standing(life, positions(wanted, life.stop))]
    if life.settled:
        assert counted == expected
    else:  # Aborted during recomputation: the held rows are lost.
        assert counted == [pair for pair in expected if pair in counted]


@given(lives())
def test_without_an_early_end_nothing_that_is_void_is_handed_on(life: Life) -> None:
    ledger, handed = RowLedger(), []
    for number, step in enumerate(void_after_the_end(life)):
        if step.start < life.stop:
            rows = step.rows(step.start, step.start + len(step.values))
            handed += ledger.add(Rows.of(step.start, rows[None], number))
    handed += ledger.finish(life.stop)
    assert all(value == position for position, value in delivered(handed))

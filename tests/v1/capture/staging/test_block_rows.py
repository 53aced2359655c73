# SPDX-License-Identifier: Apache-2.0
"""Requests that continue decoding keep their row index; no index is shared."""

from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.capture.staging.block_rows import MOST_EMPTY, BlockRows, Columns
from vllm.v1.capture.staging.blocks import Block, Pick

COLUMNS = (0, 1)
MANY = 1000


def change(
    seating: BlockRows,
    names: list[str],
    before: list[str],
    columns: Columns = COLUMNS,
    picked: dict[Columns, list[Pick]] | None = None,
) -> tuple[Block, ...]:
    """Change from one step's requests to another's, adding new ones in order."""
    seating.change()
    for name in set(before) - set(names):
        seating.leave_all(name)
    for name in names:
        seating.take(columns, name, 0, 7)
    return seating.blocks(picked or {})


def seats(block: Block) -> dict[str, int]:
    return {name: seat.place for name, seat in block.seated.items()}


@given(
    st.lists(
        st.lists(st.integers(0, 15), min_size=1, max_size=16, unique=True),
        min_size=1,
        max_size=12,
    ),
    st.sampled_from([8, 20, MANY]),
)
def test_requests_keep_their_seats_while_others_come_and_go(
    batches: list[list[int]], most_rows: int
) -> None:
    seating = BlockRows(most_rows)
    given_out: list[tuple[Block, dict[str, int]]] = []
    before: dict[str, int] = {}
    size = 0
    for batch in batches:
        names = [f"r{number}" for number in batch]
        (block,) = change(seating, names, list(before))
        found = seats(block)
        assert found.keys() == set(names)
        assert sorted(set(found.values())) == sorted(found.values())
        assert all(0 <= seat < block.num_rows for seat in found.values())
        empty = block.num_rows - len(names)
        assert empty <= max(MOST_EMPTY, block.num_rows // 4)
        assert len(COLUMNS) * block.num_rows <= max(
            most_rows, len(COLUMNS * len(names))
        )
        all_stay = block.num_rows == size and 2 * size <= most_rows
        if all_stay or (most_rows == MANY and block.num_rows >= size):
            kept = before.keys() & found.keys()
            assert {name: found[name] for name in kept} == {
                name: before[name] for name in kept
            }
        given_out.append((block, found))
        before, size = found, block.num_rows
    for block, found in given_out:
        assert seats(block) == found, "what was given out has changed"


def test_who_comes_takes_the_seat_of_who_has_gone() -> None:
    seating = BlockRows(MANY)
    change(seating, ["a", "b", "c"], [])
    (block,) = change(seating, ["a", "c"], ["a", "b", "c"])
    assert (seats(block), block.num_rows) == ({"a": 0, "c": 2}, 3)
    (block,) = change(seating, ["c", "a", "d"], ["a", "c"])
    assert (seats(block), block.num_rows) == ({"a": 0, "c": 2, "d": 1}, 3)


def test_who_stays_has_the_same_seat_and_who_jumps_has_another_at_its_place() -> None:
    seating = BlockRows(MANY)
    (before,) = change(seating, ["a", "b"], [])
    seating.change()
    seating.take(COLUMNS, "b", 0, 3)  # One of its tokens is recomputed.
    (after,) = seating.blocks({})
    assert after.seated["a"] is before.seated["a"]
    assert after.seated["b"] is not before.seated["b"]
    assert after.seated["b"] == (0, 3, 1)


def test_empty_seats_are_given_up_where_a_step_may_not_take_more_rows() -> None:
    seating = BlockRows(most_rows=6)
    change(seating, ["a", "b", "c"], [])
    seating.change()
    for name in "ab":
        seating.leave(COLUMNS, name)
    seating.take((2,), "x", 0, 7)
    first, other = seating.blocks({COLUMNS: [("p", 0, 0, 2, 4)]})
    assert (seats(first), list(first.offsets), first.num_rows) == ({"c": 0}, [1], 3)
    assert (seats(other), other.num_rows) == ({"x": 0}, 1)


def test_rows_of_prompts_lie_behind_the_seats() -> None:
    seating = BlockRows(MANY)
    change(seating, ["a", "b", "c"], [])
    chunks: list[Pick] = [("p", 0, 0, 5, 3), ("q", 0, 4, 2, 8)]
    names = ["a", "b", "c"]
    (block,) = change(seating, ["c", "a"], names, picked={COLUMNS: chunks})
    assert seats(block) == {"a": 0, "c": 2}
    assert (list(block.offsets), block.num_rows) == ([3, 8], 10)
    # After it, every request has its former index.
    (block,) = change(seating, ["c", "a"], ["c", "a"])
    assert (seats(block), block.num_rows, block.picks) == ({"c": 2, "a": 0}, 3, ())


def test_a_block_in_which_nobody_sits_is_forgotten() -> None:
    seating = BlockRows(MANY)
    change(seating, ["a"], [])
    assert change(seating, [], ["a"]) == ()
    (block,) = seating.blocks({COLUMNS: [("p", 0, 0, 2, 0)]})
    assert (list(block.offsets), block.num_rows) == ([0], 2)

# SPDX-License-Identifier: Apache-2.0
"""Who goes on decoding keeps its seat; nobody shares one."""

from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.capture.rows import Block, Pick
from vllm.v1.capture.seating import MOST_EMPTY, Seating

COLUMNS = (0, 1)
MANY = 1000


def decoding(names: list[str]) -> list[Pick]:
    """One row each, in this order."""
    return [(name, 0, 7, 1, row) for row, name in enumerate(names)]


def seats(block: Block) -> dict[str, int]:
    return {pick[0]: at for pick, at in zip(block.picks, block.offsets, strict=True)}


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
    seating = Seating(most_rows)
    before: dict[str, int] = {}
    size = 0
    for batch in batches:
        names = [f"r{number}" for number in batch]
        (block,) = seating.blocks({COLUMNS: decoding(names)})
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
        before, size = found, block.num_rows


def test_who_comes_takes_the_seat_of_who_has_gone() -> None:
    seating = Seating(MANY)
    seating.blocks({COLUMNS: decoding(["a", "b", "c"])})
    (block,) = seating.blocks({COLUMNS: decoding(["a", "c"])})
    assert (seats(block), block.num_rows) == ({"a": 0, "c": 2}, 3)
    (block,) = seating.blocks({COLUMNS: decoding(["c", "a", "d"])})
    assert (seats(block), block.num_rows) == ({"a": 0, "c": 2, "d": 1}, 3)


def test_empty_seats_are_given_up_where_a_step_may_not_take_more_rows() -> None:
    seating = Seating(most_rows=6)
    seating.blocks({COLUMNS: decoding(["a", "b", "c"])})
    first, other = seating.blocks({COLUMNS: decoding(["c"]), (2,): decoding(["x"])})
    assert (seats(first), first.num_rows) == ({"c": 0}, 1)
    assert (seats(other), other.num_rows) == ({"x": 0}, 1)


def test_rows_of_prompts_lie_one_behind_the_other() -> None:
    seating = Seating(MANY)
    seating.blocks({COLUMNS: decoding(["a", "b", "c"])})
    chunk = ("p", 0, 0, 5, 0)
    (block,) = seating.blocks({COLUMNS: [chunk, ("c", 0, 8, 1, 5)]})
    assert (seats(block), block.num_rows) == ({"p": 0, "c": 5}, 6)
    # After it, everyone is back where it was.
    (block,) = seating.blocks({COLUMNS: decoding(["c", "a"])})
    assert (seats(block), block.num_rows) == ({"c": 2, "a": 0}, 3)


def test_several_rows_of_one_request_do_not_share_a_seat() -> None:
    apart = [("a", 0, 2, 1, 2), ("a", 0, 4, 1, 4)]
    (block,) = Seating(MANY).blocks({COLUMNS: apart})
    assert block.offsets == [0, 1]

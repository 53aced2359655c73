# SPDX-License-Identifier: Apache-2.0
"""Decoding requests keep their places in a block, before the rows of others."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.residual.row_blocks import MOST_EMPTY, Block, BlockKey, BlockRows, Pick
from vllm.v1.residual.step_view import Decoding, StepView


@given(st.data())
def test_a_step_goes_on_if_it_has_the_next_token_of_each_request(
    data: st.DataObject,
) -> None:
    names = data.draw(st.lists(st.sampled_from("abc"), min_size=1, unique=True))
    computed = np.array([data.draw(st.integers(0, 3)) for _ in names], dtype=np.int32)
    one = np.ones(len(names), dtype=np.int32)
    decoding = Decoding(StepView(names, computed, one, len(names)))
    for step in range(1, 4):
        again = data.draw(st.sampled_from([names, names, names[::-1], names[:-1]]))
        moved = computed[: len(again)] + step
        counts = np.ones(len(again), dtype=np.int32)
        if again and data.draw(st.integers(0, 3)) == 0:
            changed = data.draw(st.sampled_from([moved, counts]))
            changed[data.draw(st.integers(0, len(again) - 1))] += 1
        continues = (
            again == names
            and (counts == 1).all()
            and moved.tolist() == (computed + step).tolist()
        )
        assert (
            decoding.continues(StepView(again, moved, counts, len(again))) == continues
        )
        if not continues:
            return


COLUMNS = (0, 1)
KEY = COLUMNS, False
MANY = 1000


def change(
    block_rows: BlockRows,
    names: list[str],
    before: list[str],
    key: BlockKey = KEY,
    picked: dict[BlockKey, list[Pick]] | None = None,
) -> tuple[Block, ...]:
    """Change from one step's requests to another's, adding new ones in order."""
    block_rows.unshare()
    for name in set(before) - set(names):
        block_rows.free_all(name)
    for name in names:
        block_rows.take(key, name, 0, 7)
    return block_rows.blocks(picked or {})


def places_in(block: Block) -> dict[str, int]:
    return {name: block_row.place for name, block_row in block.decoding.items()}


@given(
    st.lists(
        st.lists(st.integers(0, 15), min_size=1, max_size=16, unique=True),
        min_size=1,
        max_size=12,
    ),
    st.sampled_from([8, 20, MANY]),
)
def test_requests_keep_their_row_while_others_start_and_end(
    batches: list[list[int]], most_rows: int
) -> None:
    block_rows = BlockRows(most_rows)
    given_out: list[tuple[Block, dict[str, int]]] = []
    before: dict[str, int] = {}
    size = 0
    for batch in batches:
        names = [f"r{number}" for number in batch]
        (block,) = change(block_rows, names, list(before))
        found = places_in(block)
        assert found.keys() == set(names)
        assert sorted(set(found.values())) == sorted(found.values())
        assert all(0 <= block_row < block.num_rows for block_row in found.values())
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
        assert places_in(block) == found, "what was given out has changed"


def test_a_new_request_gets_the_row_of_one_that_has_ended() -> None:
    block_rows = BlockRows(MANY)
    change(block_rows, ["a", "b", "c"], [])
    (block,) = change(block_rows, ["a", "c"], ["a", "b", "c"])
    assert (places_in(block), block.num_rows) == ({"a": 0, "c": 2}, 3)
    (block,) = change(block_rows, ["c", "a", "d"], ["a", "c"])
    assert (places_in(block), block.num_rows) == ({"a": 0, "c": 2, "d": 1}, 3)


def test_a_request_that_recomputes_a_token_keeps_its_place() -> None:
    block_rows = BlockRows(MANY)
    (before,) = change(block_rows, ["a", "b"], [])
    block_rows.unshare()
    block_rows.take(KEY, "b", 0, 3)  # One of its tokens is recomputed.
    (after,) = block_rows.blocks({})
    assert after.decoding["a"] is before.decoding["a"]
    assert after.decoding["b"] is not before.decoding["b"]
    assert after.decoding["b"] == (0, 3, 1)


def test_rows_of_prompts_follow_those_of_decoding_requests() -> None:
    block_rows = BlockRows(MANY)
    change(block_rows, ["a", "b", "c"], [])
    chunks: list[Pick] = [("p", 0, 0, 5, 3), ("q", 0, 4, 2, 8)]
    names = ["a", "b", "c"]
    (block,) = change(block_rows, ["c", "a"], names, picked={KEY: chunks})
    assert places_in(block) == {"a": 0, "c": 2}
    assert (list(block.offsets), block.num_rows) == ([3, 8], 10)
    # After it, every request has its former index.
    (block,) = change(block_rows, ["c", "a"], ["c", "a"])
    assert (places_in(block), block.num_rows, block.picks) == ({"c": 2, "a": 0}, 3, ())

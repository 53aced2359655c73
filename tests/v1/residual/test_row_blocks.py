# SPDX-License-Identifier: Apache-2.0
"""Each selected row has a place in a block; decoding requests keep theirs."""

from collections import Counter, defaultdict
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.v1.capture._strategies import plan_for, positions, taps, wanted
from vllm.v1.capture.staging.slot_mapping import assign_slots, no_slots
from vllm.v1.residual.row_blocks import (
    MOST_EMPTY,
    Block,
    BlockKey,
    BlockRows,
    Pick,
    local_groups,
    pick_rows,
    rows_of,
)
from vllm.v1.residual.step_view import Decoding, StepView

PROMPT, END = 6, 16


@st.composite
def steps(draw: st.DrawFn) -> tuple[StepView, dict[str, dict]]:
    """A batch of requests, some of them captured, in any order and phase."""
    number = draw(st.integers(1, 5))
    ids = draw(st.permutations([f"r{i}" for i in range(number)]))
    computed = [draw(st.integers(0, END)) for _ in ids]
    scheduled = [draw(st.integers(1, 6)) for _ in ids]
    wants = {i: draw(wanted(PROMPT, END)) for i in ids if draw(st.booleans())}
    padding = draw(st.integers(0, 3))
    view = StepView(
        ids,
        np.array(computed),
        np.array(scheduled),
        sum(scheduled) + padding,
    )
    return view, wants


def blocks_of(view: StepView, groups: dict[str, Any]) -> tuple[Block, ...]:
    """The blocks of a step in which no request has a row index."""
    picked: defaultdict[BlockKey, list[Pick]] = defaultdict(list)
    for req_id, start, count, row in zip(
        view.req_ids,
        view.num_computed.tolist(),
        view.num_scheduled.tolist(),
        view.first_row.tolist(),
        strict=True,
    ):
        for place, pick in pick_rows(req_id, groups.get(req_id, ()), start, count, row):
            picked[place].append(pick)
    return BlockRows(0).blocks(picked)


@given(steps(), st.sets(taps()))
def test_each_selected_row_of_each_tap_gets_one_slot_of_its_own(
    step: tuple[StepView, dict[str, dict]], absent: set
) -> None:
    view, wants = step
    every = sorted({tap for want in wants.values() for t in want.values() for tap in t})
    columns = {tap: i for i, tap in enumerate(t for t in every if t not in absent)}
    plans = {req_id: plan_for(want, PROMPT) for req_id, want in wants.items()}
    blocks = blocks_of(
        view, {req_id: local_groups(plan, columns) for req_id, plan in plans.items()}
    )
    slots = no_slots(len(columns), view.num_rows)
    assign_slots(blocks, {}, slots)

    expected = np.zeros_like(slots, dtype=bool)
    for index, req_id in enumerate(view.req_ids):
        start = int(view.num_computed[index])
        for want in wants.get(req_id, {}).values():
            for tap, ranges in want.items():
                for position in positions(ranges, start + view.num_scheduled[index]):
                    if tap in columns and position >= start:
                        row = view.first_row[index] + position - start
                        expected[columns[tap], row] = True
    assert ((slots != -1) == expected).all()
    used = sorted(slots[expected].tolist())
    assert used == list(range(rows_of(blocks)))


@given(steps())
def test_blocks_do_not_grow_with_the_number_of_layers(
    step: tuple[StepView, dict[str, dict]],
) -> None:
    view, wants = step
    every = sorted({tap for want in wants.values() for t in want.values() for tap in t})
    columns = {tap: i for i, tap in enumerate(every)}
    groups = {i: local_groups(plan_for(w, PROMPT), columns) for i, w in wants.items()}
    blocks = blocks_of(view, groups)
    most = Counter(block.columns for block in blocks).most_common(1)
    assert not most or most[0][1] == 1


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

# SPDX-License-Identifier: Apache-2.0
"""A step that is placed like the one before is placed as if it were the first."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.capture.placement import Placed, Placement, steps_alike
from vllm.v1.capture.plan import OPEN_END, Ranges, contains, ranges_of
from vllm.v1.capture.rows import LocalGroup, StepView, pick_rows

TAPS, MOST_ROWS = 4, 24


@st.composite
def some_ranges(draw: st.DrawFn) -> Ranges:
    """Single positions, and perhaps everything from some position on."""
    named = ranges_of(draw(st.lists(st.integers(0, 14), max_size=4)))
    if draw(st.booleans()):
        named = (*(span for span in named if span[1] < 16), (16, OPEN_END))
    return named


@st.composite
def some_groups(draw: st.DrawFn) -> tuple[LocalGroup, ...]:
    groups = []
    for _ in range(draw(st.integers(1, 2))):
        columns = draw(st.sets(st.integers(0, TAPS - 1), min_size=1))
        taps = tuple((column, "post_block") for column in sorted(columns))
        ranges = draw(some_ranges())
        groups.append(LocalGroup(taps, tuple(sorted(columns)), ranges, ()))
    return tuple(groups)


def described(placed: Placed | None) -> object:
    """All that matters of a step: who has which rows at which positions."""
    if placed is None:
        return None
    picks = {
        (block.columns, req_id, group, start + placed.shift, *where)
        for block in placed.layout.blocks
        for req_id, group, start, *where in block.picks
    }
    return picks, placed.layout.launches, placed.layout.req_ids


def anew(view: StepView, groups: dict[str, tuple[LocalGroup, ...]]) -> object:
    """The same, planned without a memory."""
    picked = pick_rows(view, groups)
    if not picked:
        return None
    picks = {(columns, *pick) for columns, found in picked.items() for pick in found}
    return (
        picks,
        frozenset(column for columns in picked for column in columns),
        frozenset(pick[1] for pick in picks),
    )


def check_slots(placed: Placed) -> None:
    """Each row of each pick has a place of its own, where its block says."""
    layout, base = placed.layout, 0
    expected = np.full_like(layout.slots, -1)
    for block in layout.blocks:
        for number, column in enumerate(block.columns):
            for (*_, count, row), offset in zip(
                block.picks, block.offsets, strict=True
            ):
                assert offset + count <= block.num_rows
                first = base + number * block.num_rows + offset
                expected[column, row : row + count] = np.arange(first, first + count)
        base += len(block.columns) * block.num_rows
    assert layout.slots.tolist() == expected.tolist()
    used = layout.slots[layout.slots >= 0].tolist()
    assert len(set(used)) == len(used)
    assert layout.num_rows == base <= max(MOST_ROWS, len(used))


@given(st.data())
def test_every_step_is_placed_as_if_it_were_the_first(data: st.DataObject) -> None:
    placement = Placement(range(TAPS), MOST_ROWS)
    groups: dict[str, tuple[LocalGroup, ...]] = {}
    positions: dict[str, int] = {}
    for step in range(data.draw(st.integers(1, 25))):
        if not positions or data.draw(st.integers(0, 5)) == 0:
            name = f"r{step}"
            positions[name] = data.draw(st.integers(0, 6))
            if data.draw(st.booleans()):
                groups[name] = data.draw(some_groups())
                placement.add(name, groups[name])
        if len(positions) > 1 and data.draw(st.integers(0, 7)) == 0:
            gone = data.draw(st.sampled_from(sorted(positions)))
            del positions[gone]
            groups.pop(gone, None)
            placement.remove(gone)
        # Mostly a token each; sometimes chunks, a preemption, another order.
        usual = data.draw(st.integers(0, 3)) > 0
        batch = sorted(positions)
        counts = [1 if usual else data.draw(st.integers(1, 4)) for _ in batch]
        if data.draw(st.integers(0, 7)) == 0:
            batch.reverse()
        if data.draw(st.integers(0, 7)) == 0:
            positions[batch[0]] = 0
        scheduled = np.array(counts)
        view = StepView(
            batch,
            np.array([positions[name] for name in batch]),
            scheduled,
            int(scheduled.sum()),
        )
        placed = placement.place(view)
        assert described(placed) == anew(view, groups)
        if placed is not None:
            check_slots(placed)
        for name, count in zip(batch, counts, strict=True):
            positions[name] += count


@given(some_groups(), st.integers(0, 20))
def test_steps_are_alike_until_some_group_begins_or_ends(
    groups: tuple[LocalGroup, ...], position: int
) -> None:
    alike = steps_alike(groups, position)
    assert alike >= 0

    def treated(where: int) -> list[bool]:
        return [contains(group.ranges, where) for group in groups]

    for further in range(1, min(alike, 30) + 1):
        assert treated(position + further) == treated(position)


def test_decoding_steps_share_one_layout() -> None:
    placement = Placement(range(TAPS), MOST_ROWS)
    tap = LocalGroup(((0, "post_block"),), (0,), ((3, OPEN_END),), ())
    placement.add("a", (tap,))
    placed = [
        placement.place(StepView(["a"], np.array([at]), np.array([1]), 1))
        for at in range(6)
    ]
    assert placed[:3] == [None] * 3
    first = placed[3]
    assert first is not None
    for shift, one in enumerate(placed[3:]):
        assert one is not None and one.layout is first.layout and one.shift == shift


def test_an_end_of_a_request_that_has_left_the_batch_changes_no_layout() -> None:
    placement = Placement(range(TAPS), MOST_ROWS)
    tap = LocalGroup(((0, "post_block"),), (0,), ((0, OPEN_END),), ())
    for name in "ab":
        placement.add(name, (tap,))
    both = StepView(["a", "b"], np.array([3, 5]), np.array([1, 1]), 2)
    assert placement.place(both) is not None
    first = placement.place(StepView(["b"], np.array([6]), np.array([1]), 1))
    placement.remove("a")
    second = placement.place(StepView(["b"], np.array([7]), np.array([1]), 1))
    assert first is not None and second is not None
    assert second.layout is first.layout and second.shift == 1
    placement.remove("b")
    assert placement.place(StepView(["b"], np.array([8]), np.array([1]), 1)) is None

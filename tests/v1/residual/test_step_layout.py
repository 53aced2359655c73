# SPDX-License-Identifier: Apache-2.0
"""A layout reused from the step before equals one computed from scratch."""

from functools import partial
from typing import TypeAlias

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.capture.staging.slot_mapping import slots_of
from vllm.v1.residual.row_blocks import LocalGroup, pick_rows, rows_of
from vllm.v1.residual.spans import OPEN_END, Spans, contains, spans_of
from vllm.v1.residual.step_layout import PlacedStep, StepLayout, steps_alike
from vllm.v1.residual.step_view import StepView

TAPS, MOST_ROWS = 4, 24


@st.composite
def some_ranges(draw: st.DrawFn) -> Spans:
    """Single positions, and perhaps everything from some position on."""
    named = spans_of(draw(st.lists(st.integers(0, 14), max_size=4)))
    if draw(st.booleans()):
        named = (*(span for span in named if span[1] < 16), (16, OPEN_END))
    return named


@st.composite
def some_groups(draw: st.DrawFn) -> tuple[LocalGroup, ...]:
    """Groups in which each tap occurs at most once, as in a plan."""
    groups = []
    left = set(range(TAPS))
    for _ in range(draw(st.integers(1, 2))):
        columns = draw(st.sets(st.sampled_from(sorted(left)), min_size=1, max_size=3))
        left -= columns
        taps = tuple((column, "post_block") for column in sorted(columns))
        ranges = draw(some_ranges())
        held = draw(st.booleans())
        local = LocalGroup(taps, tuple(sorted(columns)), ranges, (), held=held)
        groups.append(local)
    return tuple(groups)


Described: TypeAlias = tuple[set[tuple[object, ...]], frozenset[int]]


def described(placed: PlacedStep | None) -> Described | None:
    """The relevant facts of a step: requests, rows and positions."""
    if placed is None:
        return None
    layout = placed.layout
    picks: set[tuple[object, ...]] = set()
    for block in layout.blocks:
        key = block.columns, block.held
        picks |= {(key, *pick) for pick in block.picks}
        for req_id, block_row in block.decoding.items():
            start, row = block_row.origin + placed.shift, layout.row_of[req_id]
            picks.add((key, req_id, block_row.group, start, 1, row))
    return picks, layout.launches


def anew(view: StepView, groups: dict[str, tuple[LocalGroup, ...]]) -> Described | None:
    """The same step, planned without state."""
    picks: set[tuple[object, ...]] = set()
    columns: set[int] = set()
    first_rows = view.first_row.tolist()
    for req_id, start, count, row in zip(
        view.req_ids,
        view.num_computed.tolist(),
        view.num_scheduled.tolist(),
        first_rows,
        strict=True,
    ):
        for place, pick in pick_rows(req_id, groups.get(req_id, ()), start, count, row):
            picks.add((place, *pick))
            columns.update(place[0])
    return (picks, frozenset(columns)) if picks else None


def check_slots(placed: PlacedStep, num_rows: int) -> None:
    """Check that each row has a separate place, according to its block."""
    layout, base = placed.layout, 0
    slots = slots_of(layout, range(TAPS), num_rows)
    expected = np.full_like(slots, -1)
    for block in layout.blocks:
        parts = [
            (1, layout.row_of[req_id], block_row.place)
            for req_id, block_row in block.decoding.items()
        ]
        parts += [
            (count, row, offset)
            for (*_, count, row), offset in zip(block.picks, block.offsets, strict=True)
        ]
        for number, column in enumerate(block.columns):
            for count, row, offset in parts:
                assert offset + count <= block.num_rows
                first = base + number * block.num_rows + offset
                expected[column, row : row + count] = np.arange(first, first + count)
        base += len(block.columns) * block.num_rows
    assert slots.tolist() == expected.tolist()
    used = slots[slots >= 0].tolist()
    assert len(set(used)) == len(used)
    assert layout.num_rows == base <= max(MOST_ROWS, len(used))
    sent = list(layout.sent)
    assert sent == list(layout.blocks[: len(sent)]), "held ones are the last"
    assert rows_of(sent) == layout.num_rows - layout.num_held
    assert all(block.held for block in layout.blocks[len(sent) :])
    part = layout.columns
    assert slots_of(layout, part, num_rows).tolist() == slots[part].tolist()
    assert (np.delete(slots, part, axis=0) == -1).all()


@given(st.data())
def test_every_step_is_placed_as_if_it_were_the_first(data: st.DataObject) -> None:
    # As pipeline stages have them; sometimes requests change to another.
    batches = data.draw(st.integers(1, 3))
    placement = StepLayout(range(TAPS), MOST_ROWS, None, batches)
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
        # Usually one token each; sometimes chunks, a preemption, another order.
        usual = data.draw(st.integers(0, 3)) > 0
        batch = sorted(positions)
        moved = data.draw(st.integers(0, 9)) == 0
        batch = [
            name for name in batch if (int(name[1:]) + step + moved) % batches == 0
        ] or batch[:1]
        counts = [1 if usual else data.draw(st.integers(1, 4)) for _ in batch]
        if data.draw(st.integers(0, 7)) == 0:
            batch.reverse()
        if data.draw(st.integers(0, 7)) == 0:
            positions[batch[0]] = 0
        if len(batch) > 1 and data.draw(st.integers(0, 7)) == 0:
            batch.pop()  # It skips this step, and continues later.
            counts.pop()
        scheduled = np.array(counts)
        starts = np.array([positions[name] for name in batch])
        assumed = data.draw(st.integers(0, 9)) == 0  # As with drafts.
        true_starts = partial(torch.from_numpy, starts) if assumed else None
        view = StepView(batch, starts, scheduled, int(scheduled.sum()), true_starts)
        placed = placement.place(view)
        assert described(placed) == anew(view, groups)
        if placed is not None:
            check_slots(placed, view.num_rows)
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
    placement = StepLayout(range(TAPS), MOST_ROWS)
    tap = LocalGroup(((0, "post_block"),), (0,), ((3, OPEN_END),), ())
    placement.add("a", (tap,))
    placed = [
        placement.place(StepView(["a"], np.array([at]), np.array([1]), 1))
        for at in range(6)
    ]
    assert placed[:3] == [None] * 3
    first = placed[3]
    assert first is not None
    for shift, one in enumerate(placed[3:], first.shift):
        assert one is not None and one.layout is first.layout and one.shift == shift


def test_batches_that_alternate_have_their_own_layouts() -> None:
    placement = StepLayout(range(TAPS), MOST_ROWS, None, 3)
    tap = LocalGroup(((0, "post_block"),), (0,), ((0, OPEN_END),), ())
    for name in "abcd":
        placement.add(name, (tap,))

    def place(names: str, at: int) -> PlacedStep:
        count = len(names)
        view = StepView([*names], np.full(count, at), np.ones(count, np.int64), count)
        placed = placement.place(view)
        assert placed is not None
        return placed

    placed = [place(names, at) for at in range(4) for names in ("ab", "cd")]
    for first in placed[:2]:
        same = placed[placed.index(first) :: 2]
        assert all(one.layout is first.layout for one in same)
        assert [one.shift - first.shift for one in same] == [0, 1, 2, 3]
    # Numbers that follow each other are of one batch.
    assert abs(placed[0].layout.number - placed[1].layout.number) > 1
    # A request that has ended is gone from its batch, and the other goes on.
    placement.remove("a")
    assert place("cd", 4).layout is placed[1].layout
    fewer = place("b", 4)
    assert fewer.layout.number == placed[0].layout.number + 1
    assert [{*block.decoding} for block in fewer.layout.blocks] == [{"b"}]


def test_an_end_of_a_request_that_has_left_the_batch_changes_no_layout() -> None:
    placement = StepLayout(range(TAPS), MOST_ROWS)
    tap = LocalGroup(((0, "post_block"),), (0,), ((0, OPEN_END),), ())
    for name in "ab":
        placement.add(name, (tap,))
    both = StepView(["a", "b"], np.array([3, 5]), np.array([1, 1]), 2)
    assert placement.place(both) is not None
    first = placement.place(StepView(["b"], np.array([6]), np.array([1]), 1))
    placement.remove("a")
    second = placement.place(StepView(["b"], np.array([7]), np.array([1]), 1))
    assert first is not None and second is not None
    assert second.layout is first.layout
    assert second.shift == first.shift + 1
    placement.remove("b")
    assert placement.place(StepView(["b"], np.array([8]), np.array([1]), 1)) is None

# SPDX-License-Identifier: Apache-2.0
"""After any sequence of steps the slots are those of the last step."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.capture.staging.slot_mapping import SlotMapping, slots_of
from vllm.v1.residual.row_blocks import LocalGroup
from vllm.v1.residual.spans import OPEN_END
from vllm.v1.residual.step_layout import StepLayout
from vllm.v1.residual.step_view import StepView

TAPS, MOST = 4, 24


def group(columns: list[int]) -> LocalGroup:
    taps = tuple((column, "post_block") for column in columns)
    return LocalGroup(taps, tuple(columns), ((0, OPEN_END),), ())


def new(batches: int = 1) -> tuple[SlotMapping, StepLayout]:
    slots = SlotMapping(TAPS, MOST, torch.device("cpu"))
    return slots, StepLayout(range(TAPS), 99, None, batches)


@given(st.data())
def test_slots_are_those_of_the_last_step(data: st.DataObject) -> None:
    # The requests of all steps, or of two batches that alternate.
    batches = data.draw(st.sampled_from([("abcx",), ("ab", "cx")]))
    slots, placement = new(len(batches))
    last: list[list[str]] = [[] for _ in batches]
    some_columns = st.lists(st.integers(0, TAPS - 1), min_size=1, unique=True)
    for name in "abc":
        placement.add(name, (group(sorted(data.draw(some_columns))),))
    positions = dict.fromkeys("abcx", 0)
    for step in range(data.draw(st.integers(1, 12))):
        if data.draw(st.integers(0, 5)) == 0:
            slots.clear()
            assert (slots.of_taps == -1).all()
        batch = step % len(batches)
        names, sizes = last[batch], [1]
        if not names or data.draw(st.integers(0, 2)) == 0:  # Usually, it continues.
            some_names = st.sampled_from(batches[batch])
            names = data.draw(st.lists(some_names, min_size=1, unique=True))
            sizes = [1, 1, 3]
        last[batch] = names
        counts = [data.draw(st.sampled_from(sizes)) for _ in names]
        starts = np.array([positions[name] for name in names])
        rows = sum(counts)
        placed = placement.place(StepView(names, starts, np.array(counts), rows))
        for name, count in zip(names, counts, strict=True):
            positions[name] += count
        if placed is None:
            slots.clear()
            continue
        padding = data.draw(st.integers(0, 4))
        slots.write(placed.layout, 5 * step, rows + padding)
        expected = np.full((TAPS, slots.of_taps.shape[1]), -1)
        expected[:, :rows] = slots_of(placed.layout, range(TAPS), rows)
        assert slots.of_taps.tolist() == expected.tolist()
        assert slots.base.item() == 5 * step


def test_a_step_like_the_one_before_changes_the_base_alone() -> None:
    slots, placement = new()
    placement.add("a", (group([1]),))
    for position in range(2):
        view = StepView(["a"], np.array([position]), np.array([1]), 1)
        placed = placement.place(view)
        assert placed is not None
        slots.write(placed.layout, position, 1)
        assert slots.base.item() == position
        assert slots.of_taps[1, 0].item() == (-7 if position else 0)
        slots.of_taps[1, 0] = -7


def test_what_is_kept_of_a_batch_is_that_of_its_last_layout() -> None:
    slots, placement = new(2)
    for name in "abc":
        placement.add(name, (group([1]),))
    for position in range(6):
        names = ["ab", "ab", "ba"][position // 2]
        for batch in (names, "c"):
            starts, ones = np.full(len(batch), position), np.ones(len(batch), int)
            placed = placement.place(StepView(list(batch), starts, ones, len(batch)))
            assert placed is not None
            slots.write(placed.layout, 0, len(batch))
            expected = slots_of(placed.layout, range(TAPS), MOST)
            assert slots.of_taps[:, :MOST].numpy().tolist() == expected.tolist()

# SPDX-License-Identifier: Apache-2.0
"""Slots are written again only where a layout is another one."""

import numpy as np
import torch

from vllm.v1.capture.staging.slot_mapping import SlotMapping, slots_of
from vllm.v1.residual.row_blocks import LocalGroup
from vllm.v1.residual.spans import OPEN_END
from vllm.v1.residual.step_layout import StepLayout
from vllm.v1.residual.step_view import StepView

TAPS, MOST = 4, 24
GROUP = LocalGroup(((1, "post_block"),), (1,), ((0, OPEN_END),), ())


def new(batches: int = 1) -> tuple[SlotMapping, StepLayout]:
    slots = SlotMapping(TAPS, MOST, torch.device("cpu"))
    return slots, StepLayout(range(TAPS), 99, None, batches)


def test_a_step_like_the_one_before_changes_the_base_alone() -> None:
    slots, placement = new()
    placement.add("a", (GROUP,))
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
        placement.add(name, (GROUP,))
    for position in range(6):
        names = ["ab", "ab", "ba"][position // 2]
        for batch in (names, "c"):
            starts, ones = np.full(len(batch), position), np.ones(len(batch), int)
            placed = placement.place(StepView(list(batch), starts, ones, len(batch)))
            assert placed is not None
            slots.write(placed.layout, 0, len(batch))
            expected = slots_of(placed.layout, range(TAPS), MOST)
            assert slots.of_taps[:, :MOST].numpy().tolist() == expected.tolist()

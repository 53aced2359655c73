# SPDX-License-Identifier: Apache-2.0
"""The slot mapping on the device, which CUDA graphs read at each tap.

The slot of a token at a tap is the staging row that its value is written to, relative
to a base, or -1. While the batch stays the same, only the base changes between steps.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from vllm.model_executor.layers.residual.capture_op import ALIGNMENT
from vllm.utils.math_utils import round_up
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.residual.row_blocks import Block
from vllm.v1.residual.step_layout import Layout


class SlotMapping:
    """The slots of all taps of this process; -1 where nothing is captured.

    Used on the engine's thread only.
    """

    def __init__(self, num_taps: int, most_tokens: int, device: torch.device) -> None:
        """Allocate the persistent tensors, whose addresses CUDA graphs hold."""
        length = round_up(most_tokens, ALIGNMENT // torch.int32.itemsize)
        self.of_taps = torch.full(
            (num_taps, length), -1, dtype=torch.int32, device=device
        )
        self.base = torch.zeros(1, dtype=torch.int32, device=device)
        """`[1]`: the staging row that slots are relative to."""
        self._laid: Layout | None = None
        """The layout that was last written."""
        self._written = 0
        """Only the slots of tokens below this index may differ from -1."""
        self._kept: dict[int, tuple[Layout, tuple[range, int], torch.Tensor]] = {}
        """By batch, if several alternate: slots on the device, and of what they are."""

    def write(self, layout: Layout, first_row: int, num_tokens: int) -> None:
        """Set the slots for a step.

        Args:
            layout: of the step.
            first_row: first staging row of the step.
            num_tokens: tokens that the forward pass computes, padding included; tokens
                that are not in the layout get the slot -1.

        """
        if layout is not self._laid:
            self._lay(layout, max(num_tokens, layout.num_tokens))
        self.base.fill_(first_row)

    def clear(self) -> None:
        """Set all slots to -1."""
        if self._written:
            self.of_taps[:, : self._written].fill_(-1)
            self._laid, self._written = None, 0

    def _lay(self, layout: Layout, num_tokens: int) -> None:
        """Write the slots of a layout, and -1 for all other tokens and taps."""
        before, columns = self._laid, layout.columns
        if before is not None and before.columns != columns:
            start = min(columns.start, before.columns.start)
            columns = range(start, max(columns.stop, before.columns.stop))
        place = columns, max(num_tokens, self._written)
        target = self.of_taps[columns.start : columns.stop, : place[1]]
        if before is None or before.batch == layout.batch:
            async_tensor_h2d(slots_of(layout, *place), out=target)
        else:
            # Each of them has the same layout for many steps. With two pipeline
            # stages this takes 0.2 ms of a step less, of 2.7, with a profiler.
            kept = self._kept.get(layout.batch)
            if kept is None or kept[0] is not layout or kept[1] != place:
                slots = async_tensor_h2d(slots_of(layout, *place), target.device)
                kept = self._kept[layout.batch] = layout, place, slots
            target.copy_(kept[2])
        self._laid, self._written = layout, num_tokens


def slots_of(layout: Layout, columns: range, num_rows: int) -> npt.NDArray[np.int32]:
    """The slots of the taps `columns`, relative to the step's first staging row.

    Args:
        layout: of the step.
        columns: must include the layout's own.
        num_rows: number of tokens.

    Returns:
        `[len(columns), num_rows]` int32; -1 where nothing is captured.

    """
    slots = no_slots(len(columns), num_rows)
    assign_slots(layout.blocks, layout.row_of, slots, columns.start)
    return slots


def assign_slots(
    blocks: Sequence[Block],
    row_of: Mapping[str, int],
    slots: npt.NDArray[np.int32],  # [some taps of this process, num_rows]
    first_column: int = 0,
) -> None:
    """Write the staging row of each selected token into `slots`.

    Staging rows count from the first one of the step. Each block is laid out as
    `[taps, rows]`, the blocks one after the other.

    Args:
        blocks: of the step.
        row_of: by decoding request, the index of its token in the step's tensors.
        slots: written; its first row belongs to the tap `first_column`.
        first_column: at most the lowest column of the blocks.

    """
    base = 0
    for block in blocks:
        rows = [row_of[req_id] for req_id in block.decoding]
        places = [row.place for row in block.decoding.values()]
        for (*_, count, row), offset in zip(block.picks, block.offsets):
            rows.extend(range(row, row + count))
            places.extend(range(offset, offset + count))
        if block.each > 1:
            places = [block.each * at for at in places]
        columns = np.array(block.columns)[:, None] - first_column
        after = base + block.num_staged
        firsts = np.arange(base, after, block.num_rows * block.each)[:, None]
        slots[columns, rows] = firsts + places
        base = after


def no_slots(num_taps: int, num_rows: int) -> npt.NDArray[np.int32]:
    """Slots `[num_taps, num_rows]` that are all -1 (all bits set): nothing is captured.

    Made from a `bytearray`, because `np.full` would release the GIL.
    """
    memory = bytearray(b"\xff") * (4 * num_taps * num_rows)
    return np.frombuffer(memory, dtype=np.int32).reshape(num_taps, num_rows)

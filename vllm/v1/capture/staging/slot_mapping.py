# SPDX-License-Identifier: Apache-2.0
"""The slots on the device: what recorded graphs read, written where a step differs.

A slot says where in staging memory a token's row goes, counted from the base, which is
the only thing that changes from one step to the next while the batch stays.
"""

import torch

from vllm.model_executor.layers.residual.capture_op import ALIGNMENT
from vllm.utils.math_utils import round_up
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.capture.staging.step_layout import Layout

MOST_VIEWS = 64
"""Views that are kept: making one takes as long as copying into it."""


class SlotMapping:
    """Of all taps of this process; -1 wherever nothing is captured."""

    def __init__(self, num_taps: int, most_tokens: int, device: torch.device) -> None:
        """Allocate them, once: recorded graphs hold the addresses."""
        length = round_up(most_tokens, ALIGNMENT // torch.int32.itemsize)
        self.of_taps = torch.full(
            (num_taps, length), -1, dtype=torch.int32, device=device
        )
        self.base = torch.zeros(1, dtype=torch.int32, device=device)
        """The staging row that slots are counted from."""
        self._views: dict[tuple[range, int], torch.Tensor] = {}
        self._laid: Layout | None = None
        """The layout that is in the slots."""
        self._written = 0
        """The slots of the tokens below may hold something."""

    def write(self, layout: Layout, first_row: int, num_tokens: int) -> None:
        """A step's rows go where its layout says, from a staging row on.

        Its pass computes `num_tokens`, with padding; those that are none of the
        layout's have no slots.
        """
        if layout is not self._laid:
            self._lay(layout, max(num_tokens, layout.num_tokens))
        self.base.fill_(first_row)

    def clear(self) -> None:
        """A graph that always launches its taps must find nothing to do."""
        if self._written:
            self.of_taps[:, : self._written].fill_(-1)
            self._laid, self._written = None, 0

    def _lay(self, layout: Layout, num_tokens: int) -> None:
        """Write a layout's slots, and that all other tokens and taps have none."""
        before, columns = self._laid, layout.columns
        if before is not None and before.columns != columns:
            start = min(columns.start, before.columns.start)
            columns = range(start, max(columns.stop, before.columns.stop))
        slots = layout.slots(columns, max(num_tokens, self._written))
        async_tensor_h2d(slots, out=self._view(columns, slots.shape[1]))
        self._laid, self._written = layout, num_tokens

    def _view(self, columns: range, num_tokens: int) -> torch.Tensor:
        view = self._views.get((columns, num_tokens))
        if view is None:
            if len(self._views) >= MOST_VIEWS:
                self._views.clear()
            view = self.of_taps[columns.start : columns.stop, :num_tokens]
            self._views[columns, num_tokens] = view
        return view

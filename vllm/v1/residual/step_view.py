# SPDX-License-Identifier: Apache-2.0
"""A runner-neutral view of a step: its batch, and the positions of its requests."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch


class StepView(NamedTuple):
    """A step's requests with their token counts, in batch order."""

    req_ids: Sequence[str]
    num_computed: npt.NDArray[np.integer]  # [num_reqs], position of the first token
    num_scheduled: npt.NDArray[np.integer]  # [num_reqs]
    num_rows: int
    """Rows of the step's tensors, padding included."""
    true_starts: Callable[[], torch.Tensor] | None = None
    """Returns the true `num_computed` `[num_reqs]`, a tensor that may be on the device.

    None if `num_computed` is exact. With draft tokens and asynchronous scheduling a
    step is prepared before it is known how many drafts of the last step were rejected;
    `num_computed` then assumes none.
    """

    @property
    def first_row(self) -> npt.NDArray[np.integer]:  # [num_reqs]
        """Index of each request's first token in the step's tensors."""
        return np.cumsum(self.num_scheduled) - self.num_scheduled

    @property
    def only_decodes(self) -> bool:
        """Whether every request has one token."""
        return bool((self.num_scheduled == 1).all())

    def settled(self) -> "StepView":
        """The view with true positions; synchronizes with the device if needed."""
        if self.true_starts is None:
            return self
        starts = self.true_starts().cpu().numpy()
        return self._replace(num_computed=starts, true_starts=None)


class Decoding:
    """Detects whether a pure decode step is followed by one of the same batch.

    Compares bytes, because operations of NumPy would take longer than everything else
    done for such a step.
    """

    def __init__(self, view: StepView) -> None:
        """Start with a step that has one token per request."""
        self._req_ids = list(view.req_ids)
        self._scheduled = view.num_scheduled.tobytes()
        self._next = view.num_computed + 1

    def continues(self, view: StepView) -> bool:
        """Whether a step has the next token of each of these requests, in this order.

        If so, the next call compares with the step after it.
        """
        same = (
            view.num_computed.tobytes() == self._next.tobytes()
            and view.num_scheduled.tobytes() == self._scheduled
            and list(view.req_ids) == self._req_ids
        )
        if same:
            self._next += 1
        return same


@dataclass(frozen=True, slots=True)
class TrueStarts:
    """The assumed and true start positions of a step's requests.

    `true` may be read after the step was computed.
    """

    req_ids: Sequence[str]
    assumed: npt.NDArray[np.integer]  # [num_reqs]
    true: torch.Tensor  # [num_reqs], on its way to the host

    @staticmethod
    def of(view: StepView) -> "TrueStarts | None":
        """Start copying the true positions to the host; None if `view` is exact."""
        if view.true_starts is None:
            return None
        starts = view.true_starts()
        if starts.device.type != "cpu":
            host = torch.empty_like(starts, device="cpu", pin_memory=True)
            starts = host.copy_(starts, non_blocking=True)
        return TrueStarts(list(view.req_ids), view.num_computed.copy(), starts)

    def shifts(self) -> dict[str, int]:
        """By request, the true position minus the assumed one."""
        shifts = (self.true.numpy() - self.assumed).tolist()
        return dict(zip(self.req_ids, shifts, strict=True))

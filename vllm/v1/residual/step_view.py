# SPDX-License-Identifier: Apache-2.0
"""What a model runner says of a step: its batch and where its requests begin."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch


class StepView(NamedTuple):
    """What the runner-neutral code needs to know of a step, in batch order."""

    req_ids: Sequence[str]
    num_computed: npt.NDArray[np.integer]  # [num_reqs], position of the first token
    num_scheduled: npt.NDArray[np.integer]  # [num_reqs]
    num_rows: int
    """Rows of the step's tensors, padding included."""
    true_starts: Callable[[], torch.Tensor] | None = None
    """Gives `[num_reqs]`, on the device: what `num_computed` should be. None where it
    is that. With drafts and asynchronous scheduling a step is prepared before it is
    known how many drafts of the last one were rejected; `num_computed` assumes none.
    """

    @property
    def first_row(self) -> npt.NDArray[np.integer]:  # [num_reqs]
        """Row of each request's first token: they follow one another."""
        return np.cumsum(self.num_scheduled) - self.num_scheduled

    @property
    def only_decodes(self) -> bool:
        """Whether every request has one token."""
        return bool((self.num_scheduled == 1).all())

    def settled(self) -> "StepView":
        """The view with true positions. Waits for the device if they are there."""
        if self.true_starts is None:
            return self
        starts = self.true_starts().cpu().numpy()
        return self._replace(num_computed=starts, true_starts=None)


class Decoding:
    """A step of one token a request, as most are: is the next one like it?

    Bytes are compared, as NumPy's operations take longer than all else that is done
    for such a step.
    """

    def __init__(self, view: StepView) -> None:
        """Begin with a step that has one token of each of its requests."""
        self._req_ids = list(view.req_ids)
        self._scheduled = view.num_scheduled.tobytes()
        self._next = view.num_computed + 1

    def goes_on(self, view: StepView) -> bool:
        """Whether a step has the next token of each of these requests, in this order.

        If so, the step behind it is asked for from now on.
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
    """Where the requests of a step truly began: known once it is computed."""

    req_ids: Sequence[str]
    assumed: npt.NDArray[np.integer]  # [num_reqs]
    true: torch.Tensor  # [num_reqs], on its way to the host

    @staticmethod
    def of(view: StepView) -> "TrueStarts | None":
        """What `view` will know; None where it knows already."""
        if view.true_starts is None:
            return None
        starts = view.true_starts()
        if starts.device.type != "cpu":
            host = torch.empty_like(starts, device="cpu", pin_memory=True)
            starts = host.copy_(starts, non_blocking=True)
        return TrueStarts(list(view.req_ids), view.num_computed.copy(), starts)

    def shifts(self) -> dict[str, int]:
        """By how much each request's positions differ from what was assumed."""
        shifts = (self.true.numpy() - self.assumed).tolist()
        return dict(zip(self.req_ids, shifts, strict=True))

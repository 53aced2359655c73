# SPDX-License-Identifier: Apache-2.0
"""The table row of each token of a step."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.residual.step_view import StepView
from vllm.v1.steering.slots import ZERO_ROW


class TokenRows:
    """The table row of each token of a step, in memory that CUDA graphs read."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.index = torch.full((size,), ZERO_ROW, dtype=torch.int32, device=device)
        self._rows: npt.NDArray[np.int32] | None = None
        self._written = 0
        self._unchanged = True
        """Whether the memory already holds the plan."""

    def plan(self, rows: npt.NDArray[np.int32] | None) -> None:
        """Set the rows of the next step; None: no token is steered."""
        self._rows = rows
        self._unchanged = rows is None and not self._written

    def write(self) -> int | None:
        """Write the plan, unless the memory holds it already.

        Returns:
            The number of tokens whose rows were written; None if nothing changed.

        """
        if self._unchanged:
            return None
        num_tokens = 0 if self._rows is None else len(self._rows)
        before, self._written = self._written, max(self._written, num_tokens)
        if before > num_tokens:
            self.index[num_tokens:before].fill_(ZERO_ROW)
        if self._rows is not None:
            async_tensor_h2d(self._rows, out=self.index[:num_tokens])
        self._written = num_tokens
        self._unchanged = True
        return num_tokens


def token_rows(
    rows: Sequence[tuple[int, int]], prompt_lengths: Sequence[int], view: StepView
) -> npt.NDArray[np.int32]:
    """The row of each token of a step `[num_tokens]`; positions decide the phase.

    Most steps have one or two tokens per request, for which a Python loop is faster
    than NumPy calls.

    Args:
        rows: prefill and decode row of each request.
        prompt_lengths: prompt length of each request, in tokens.
        view: the step's requests and tokens.

    """
    found: list[int] = []
    counts: list[int] = []
    computed, scheduled = view.num_computed.tolist(), view.num_scheduled.tolist()
    for (prefill, decode), length, start, count in zip(
        rows, prompt_lengths, computed, scheduled, strict=True
    ):
        of_prompt = min(max(length - start, 0), count)
        if of_prompt:
            found.append(prefill)
            counts.append(of_prompt)
        if of_prompt < count:
            found.append(decode)
            counts.append(count - of_prompt)
    of_each = np.array(found, dtype=np.int32)
    return of_each if len(found) == sum(counts) else np.repeat(of_each, counts)

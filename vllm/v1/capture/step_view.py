# SPDX-License-Identifier: Apache-2.0
"""What a consumer that runs within the step sees of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRequestView:
    """One request's rows in a step."""

    req_id: str
    """The engine's id of the request."""
    start: int
    """First row in the step's tensors."""
    end: int
    """The row after its last."""
    phase: Literal["prefill", "decode"]
    token_ids: npt.NDArray[np.int64]
    """`[end - start]`, the tokens of the rows; -1 for generated ones, which the host
    does not wait for."""
    conversation_id: str | None = None
    steering: Any = None
    """Always None: gates of requests act on the device."""


@dataclass(frozen=True, slots=True)
class StepCaptureView:
    """The rows of a step, valid during the call that is given them."""

    step: int
    """Counts the steps that have rows, from 0."""
    tensors: Mapping[tuple[int, str], torch.Tensor]
    """By `(layer, hook)`: `[rows, hidden_size]` on the device, in its dtype."""
    requests: Sequence[StepRequestView]

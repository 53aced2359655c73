# SPDX-License-Identifier: Apache-2.0
"""The context that a hook function receives with the rows."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class HookContext:
    """The first argument of a hook function, which is called `fn(ctx, h)`.

    `h` is `[seq_len, hidden_size]` on the device, in the model's dtype: the rows of one
    request in this step. A function that returns a tensor of the same shape, or changes
    `h` in place, changes the stream; returning None leaves it unchanged.
    """

    layer_idx: int
    """0-based index of the decoder block."""
    seq_len: int
    """Number of rows in this call: of a prompt or a part of it; 1 during generation."""
    saved: dict[Any, Any]
    """The hook's result: one dictionary for all layers and steps of a request."""
    positions: range
    """Token positions of the rows."""
    num_prompt_tokens: int
    request_id: str
    model: nn.Module
    """The loaded model, or this process's part of it."""
    get_parameter: Callable[[str], torch.Tensor]
    """Returns a whole parameter of the model by name, gathered over tensor-parallel
    ranks.

    A parameter of another pipeline stage must have been prefetched.
    """

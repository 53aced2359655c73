# SPDX-License-Identifier: Apache-2.0
"""What a hook function is given beside the rows."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class HookContext:
    """The first argument of a hook function, which is called `fn(ctx, h)`.

    `h` is `[seq_len, hidden_size]` on the device, in the model's dtype: the rows of one
    request that this step computes. A function that returns a tensor of the same shape,
    or changes `h` in place, changes the stream; None leaves it as it is.
    """

    layer_idx: int
    """0-based index of the decoder block."""
    seq_len: int
    """Rows in this call: of a prompt, or of a part of it; 1 while generating."""
    saved: dict[Any, Any]
    """What the hook keeps: the same dictionary for all layers and steps of a request.
    It is the hook's result."""
    positions: range
    """Token positions of the rows."""
    num_prompt_tokens: int
    request_id: str
    model: nn.Module
    """The loaded model, of which this process may have a part only."""
    get_parameter: Callable[[str], torch.Tensor]
    """A parameter of the model by its name, whole: gathered over tensor-parallel ranks.

    A parameter of another pipeline stage must have been prefetched.
    """

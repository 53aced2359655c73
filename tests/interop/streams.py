# SPDX-License-Identifier: Apache-2.0
"""A pass of the library's model, with the output of each layer."""

from collections.abc import Callable
from typing import Any

import torch

Change = Callable[[int, torch.Tensor], torch.Tensor]


def streams_of(
    reference: Any, tokens: Any, change: Change | None = None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits, and each layer's output `[prompts, tokens, hidden]`.

    Args:
        reference: the model.
        tokens: token ids of a prompt, or `[prompts, tokens]`.
        change: `change(layer, output)` goes on in place of the output.

    """
    found: list[torch.Tensor] = []

    def hook(layer: int) -> Any:
        def after(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
            found.append(output if change is None else change(layer, output))
            return found[-1]

        return after

    layers = reference.model.layers
    handles = [one.register_forward_hook(hook(n)) for n, one in enumerate(layers)]
    try:
        with torch.no_grad():
            return reference(torch.atleast_2d(torch.as_tensor(tokens))).logits, found
    finally:
        for handle in handles:
            handle.remove()

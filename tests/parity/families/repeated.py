# SPDX-License-Identifier: Apache-2.0
"""Decoders that run some of their layers several times per pass."""

from collections.abc import Mapping

import torch
from torch import nn

from tests.parity.cases import case
from tests.parity.recipe import Recipe

HIGH, LOW = 2, 1
HRM = {
    "num_hidden_layers": 2,  # of each of its two stacks
    "H_cycles": HIGH,
    "L_cycles": LOW,
    "embedding_scale": 1.0,
}


def hrm_order(model: nn.Module) -> list[tuple[nn.Module, int]]:
    """In each slow cycle, the fast stack runs several times and the slow one once."""
    slow, fast = (model.get_submodule(f"model.{s}_module.layers") for s in "HL")
    assert isinstance(slow, nn.ModuleList)
    assert isinstance(fast, nn.ModuleList)
    found: list[tuple[nn.Module, int]] = []
    for cycle in range(HIGH):
        for step in range(LOW):
            found += [(layer, cycle * LOW + step) for layer in fast]
        found += [(layer, cycle) for layer in slow]
    return found


def prompt_both_ways(
    ids: torch.Tensor, num_prompt_tokens: int
) -> Mapping[str, torch.Tensor]:
    """Prompt tokens attend to later ones of the prompt."""
    prompt = torch.arange(ids.shape[1])[None] < num_prompt_tokens
    return {"input_ids": ids, "token_type_ids": prompt.long()}


CASES = [
    case(
        "HrmTextForCausalLM",
        "hrm_text",
        recipe=Recipe(order=hrm_order, given=prompt_both_ways),
        engine={"max_num_batched_tokens": 64},
        representative=True,
        **HRM,
    ),
]

# SPDX-License-Identifier: Apache-2.0
"""Decoders that run some of their layers several times per pass."""

from torch import nn

from tests.parity.cases import Case, common
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


CASES = [
    Case(
        architecture="HrmTextForCausalLM",
        model_type="hrm_text",
        options=common(**HRM),
        recipe=Recipe(order=hrm_order, both_ways=True),
        engine={"max_num_batched_tokens": 64},
    ),
]

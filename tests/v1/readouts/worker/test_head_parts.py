# SPDX-License-Identifier: Apache-2.0
"""What follows a projection is found, and what has no linear form is an error."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from vllm.v1.readouts.worker.head_parts import HeadParts, Projected

HEADS, SIZE, WIDTH, ROWS = 3, 5, 8, 6


class Projection(nn.Linear):
    """Computes with packed weights, which only its method reads."""

    def __init__(self) -> None:
        super().__init__(HEADS * SIZE, WIDTH)
        self.packed, self.weight = self.weight, None  # type: ignore[assignment]
        self.quant_method = SimpleNamespace(apply=lambda one, x: x @ one.packed.T)


def norms() -> list[nn.Module]:
    made = [nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)]
    for one in made:
        for weight in one.parameters():
            nn.init.normal_(weight)
    return made


@pytest.mark.parametrize(
    "behind",
    [
        lambda rows, _: 0.3 * rows,
        lambda rows, norms: norms[0](rows),
        lambda rows, norms: 2 * norms[1](rows),
    ],
)
@torch.no_grad()
def test_parts_sum_to_what_is_added_less_biases(behind: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    projection, own = Projection(), norms()
    parts = HeadParts({4: Projected(projection, own, HEADS, HEADS * SIZE)})
    z, directions = torch.randn(ROWS, HEADS * SIZE), torch.randn(2, WIDTH)
    output = z @ projection.packed.T + projection.bias
    added = behind(output, own)
    kept: dict[Any, torch.Tensor] = {}
    given = z, added, directions, kept
    found = parts.parts(4, tuple(range(HEADS)), *given)
    form = parts._layers[4].form
    assert form is not None
    bias = form.own(projection.bias) * form.scale(output, added) + form.bias
    whole = found.sum(1) + bias @ directions.T
    torch.testing.assert_close(whole, added @ directions.T)
    torch.testing.assert_close(parts.parts(4, (2, 0), *given), found[:, [2, 0]])
    added[1] += 1
    wrong = parts.parts(4, (2, 0), *given).isnan()
    assert wrong[1].all() and not wrong[[0, *range(2, ROWS)]].any()
    nothing = torch.zeros(1, HEADS * SIZE), torch.zeros(1, WIDTH) + form.bias
    projection.bias.zero_()
    assert not parts.parts(4, (1,), *nothing, directions, kept).any()


@torch.no_grad()
def test_a_gate_in_between_is_an_error() -> None:
    torch.manual_seed(0)
    projection = Projection()
    parts = HeadParts({0: Projected(projection, norms(), HEADS, HEADS * SIZE)})
    z = torch.randn(ROWS, HEADS * SIZE)
    gated = (z * torch.rand(z.shape)) @ projection.packed.T
    with pytest.raises(ValueError, match="layer 0 .* gate"):
        parts.parts(0, (0,), z, gated, torch.randn(2, WIDTH), {})

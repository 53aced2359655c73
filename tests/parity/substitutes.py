# SPDX-License-Identifier: Apache-2.0
"""Functions that upstream and the library compute differently.

The comparison is about the places of hook points. So where the two differ in a
function, such as an approximated activation, the library's model uses upstream's
function, from a formula of our own, without upstream's code.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Substitute:
    """A replacement for a module of the library's model."""

    module: str
    """The suffix of the module's name; it is replaced in every layer."""
    build: Callable[[nn.Module], nn.Module]
    """Creates the replacement from the library's module, which has its weights
    loaded."""
    why: str
    """How upstream and the library differ."""

    def apply(self, model: nn.Module) -> None:
        """Replace the modules."""
        names = [name for name, _ in model.named_modules() if self._is_meant(name)]
        assert names, f"no module is called {self.module}"
        for name in names:
            model.set_submodule(name, self.build(model.get_submodule(name)))

    def _is_meant(self, name: str) -> bool:
        return f".{name}".endswith(f".{self.module}")


def exact_gelu(module: nn.Module) -> nn.Module:
    """`x * P(Z <= x)` for a standard normal Z."""
    return nn.GELU(approximate="none")


class XieluInBfloat16(nn.Module):
    """The expanded integral of the ELU, with its two parameters rounded to bfloat16.

    `a x^2 + x / 2` for positive x, `b (exp(x) - 1 - x) + x / 2` for others, where `a =
    softplus(alpha_p)` and `b = 1/2 + softplus(alpha_n)`. Each step of computing `a` and
    `b` is rounded; the steps that use `x` are not.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        positive, negative = (
            nn.functional.softplus(module.get_parameter(name).bfloat16())
            for name in ("alpha_p", "alpha_n")
        )
        self.above = positive.float()
        self.below = (0.5 + negative).float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bent = x.clamp(max=0).expm1() - x
        return torch.where(x > 0, self.above * x * x, self.below * bent) + x / 2


def unscaled_layer_inputs(module: nn.Module) -> nn.Module:
    """Gemma 3n's decoder whose inputs of layers, of two summands, are not scaled."""
    module.get_buffer("per_layer_input_scale").fill_(1.0)
    return module


EXACT_GELU = Substitute(
    "gelu_impl",
    exact_gelu,
    "the library's model is given the exact GELU, as upstream computes it, for its"
    " approximation by a tanh",
)
XIELU = Substitute(
    "act_fn",
    XieluInBfloat16,
    "the library's model is given an xIELU with parameters in bfloat16, as upstream"
    " keeps them in every model, for one with parameters in the model's dtype",
)
NO_LAYER_TABLE = Substitute(
    "model",
    unscaled_layer_inputs,
    "the library's model has a table of zeros as each layer's own embeddings, unscaled,"
    " because upstream ignores the table where there is text alone",
)

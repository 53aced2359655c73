# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch
from torch import nn
from transformers.activations import ACT2CLS

from tests.parity.substitutes import EXACT_GELU, XIELU, Substitute

POINTS = torch.linspace(-6, 6, 97)


def xielu(dtype: torch.dtype) -> nn.Module:
    """The library's module, with parameters that bfloat16 cannot represent."""
    module = ACT2CLS["xielu"](dtype=dtype)
    with torch.no_grad():
        module.alpha_p.fill_(0.3141592)
        module.alpha_n.fill_(-0.2718281)
    return module


@pytest.mark.parametrize(
    ("dtype", "alike"), [(torch.bfloat16, True), (torch.float32, False)]
)
def test_the_xielu_has_its_parameters_in_bfloat16(
    dtype: torch.dtype, alike: bool
) -> None:
    found = XIELU.build(xielu(torch.float32))(POINTS)
    with torch.no_grad():
        expected = xielu(dtype)(POINTS)
    assert found.dtype == torch.float32
    assert torch.allclose(found, expected, rtol=1e-5, atol=3e-6) == alike
    assert torch.allclose(found, expected, rtol=1e-2, atol=1e-2)


def test_the_gelu_is_exact() -> None:
    found = EXACT_GELU.build(nn.Identity())(POINTS)
    expected = [x * (1 + math.erf(x / math.sqrt(2))) / 2 for x in POINTS.tolist()]
    assert torch.allclose(found, torch.tensor(expected), atol=1e-6)


def test_modules_are_replaced_wherever_they_are() -> None:
    model = nn.ModuleList(nn.ModuleDict({"act": nn.ReLU()}) for _ in range(2))
    Substitute("act", lambda module: nn.Tanh(), "").apply(model)
    assert [type(layer["act"]) for layer in model] == [nn.Tanh, nn.Tanh]


def test_a_module_that_is_nowhere_is_an_error() -> None:
    with pytest.raises(AssertionError, match="fact"):
        Substitute("fact", lambda module: module, "").apply(
            nn.ModuleDict({"artifact": nn.ReLU()})
        )

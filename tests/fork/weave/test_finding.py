# SPDX-License-Identifier: Apache-2.0
import pytest

from fork.weave.finding import decoder_layers, may_hold_layers

MODULE = """
from torch import nn


class Norm(nn.Module):
    def forward(self, x):
        return x


class Experts(nn.Module):
    def forward(self, x):
        return x


class {name}(nn.Module):
    def __init__(self, config):
        self.norm = Norm()
        self.experts = Experts()

    def forward(self, hidden_states):
        return hidden_states


class Model(nn.Module):
{model}
"""
NAMING = {
    "a parameter's default": """
    def __init__(self, layer_type: type = Rung):
        self.layers = make_layers(3, lambda prefix: layer_type(prefix))
""",
    "a table": """
    def __init__(self, config):
        self.layers = make_layers(3, lambda prefix: KINDS[config.kind](prefix))

KINDS = {"a": Rung}
""",
    "a keyword for the base class": """
    def __init__(self):
        super().__init__(layer_type=Rung)
""",
    "a lambda, beside a part of a layer": """
    def __init__(self):
        self.experts = Experts()
        self.layers = make_layers(3, lambda prefix: Rung(prefix))
""",
}


@pytest.mark.parametrize("model", NAMING.values(), ids=NAMING)
def test_the_model_names_its_layer(model: str) -> None:
    assert decoder_layers(MODULE.format(name="Rung", model=model)) == ["Rung"]


def test_a_class_that_is_only_mentioned_is_none() -> None:
    model = "    def load(self):\n        return isinstance(self.x, Rung)"
    assert decoder_layers(MODULE.format(name="Rung", model=model)) == []


def test_the_cheap_look_lets_every_kind_through() -> None:
    for text in (
        "class MyDecoderLayer(A):",
        "class HybridLayer:",
        "x = make_layers(1)",
    ):
        assert may_hold_layers(text)
    assert not may_hold_layers("class Attention:\n    pass")

# SPDX-License-Identifier: Apache-2.0
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
NAMING = """
    def __init__(self):
        self.experts = Experts()
        self.layers = make_layers(3, lambda prefix: Rung(prefix))
"""


def test_the_model_names_its_layer_beside_a_part_of_it() -> None:
    assert decoder_layers(MODULE.format(name="Rung", model=NAMING)) == ["Rung"]


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

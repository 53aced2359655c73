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


def found(model: str, name: str = "Rung", extra: str = "") -> list[str]:
    body = "\n".join(f"    {line}" for line in model.strip("\n").splitlines())
    return decoder_layers(MODULE.format(name=name, model=body) + extra)


def test_a_lambda_names_the_layer() -> None:
    model = """
def __init__(self):
    self.layers = make_layers(3, lambda prefix: Rung(prefix))
"""
    assert found(model) == ["Rung"]


def test_a_local_function_names_the_layer() -> None:
    model = """
def __init__(self):
    def get_layer(prefix):
        return Rung(prefix)

    _, _, self.layers = make_layers(3, get_layer, prefix="layers")
"""
    assert found(model) == ["Rung"]


def test_a_parameter_names_the_layer_by_its_default() -> None:
    model = """
def __init__(self, layer_type: type = Rung):
    self.layers = make_layers(3, lambda prefix: layer_type(prefix))
"""
    assert found(model) == ["Rung"]


def test_an_attribute_names_the_layer() -> None:
    model = """
block_cls: type = Rung

def __init__(self):
    self.layers = make_layers(3, lambda prefix: self.block_cls(prefix))
"""
    assert found(model) == ["Rung"]


def test_a_table_names_the_layers() -> None:
    model = """
def __init__(self, config):
    self.layers = make_layers(3, lambda prefix: KINDS[config.kind](prefix))
"""
    assert found(model, extra='\nKINDS = {"a": Rung}\n') == ["Rung"]


def test_a_keyword_names_the_layer_of_a_base_class() -> None:
    model = "def __init__(self):\n    super().__init__(layer_type=Rung)"
    assert found(model) == ["Rung"]


def test_a_name_is_enough() -> None:
    assert found("pass", name="RungDecoderLayer") == ["RungDecoderLayer"]


def test_a_class_that_is_only_mentioned_is_none() -> None:
    assert found("def load(self):\n    return isinstance(self.x, Rung)") == []


def test_the_model_and_the_parts_of_a_layer_are_none() -> None:
    model = """
def __init__(self):
    self.experts = Experts()
    self.layers = make_layers(3, lambda prefix: Rung(prefix))
"""
    assert found(model) == ["Rung"]


def test_the_cheap_look_lets_every_kind_through() -> None:
    for text in (
        "class MyDecoderLayer(A):",
        "class HybridLayer:",
        "x = make_layers(1)",
    ):
        assert may_hold_layers(text)
    assert not may_hold_layers("class Attention:\n    pass")

# SPDX-License-Identifier: Apache-2.0
"""A miniature release: a registry, and models in upstream's idioms."""

from collections.abc import Mapping
from pathlib import Path

MODELS = "vllm/model_executor/models"
LAYER = """
from torch import nn

class {name}DecoderLayer(nn.Module):
    def forward(self, hidden_states):
        hidden_states = hidden_states + self.attn(self.norm(hidden_states))
        return hidden_states + self.mlp(self.norm(hidden_states))
"""
STACK = """
class {name}Model(nn.Module):
    def __init__(self, *, layer_type=None):
        layer_type = layer_type or {name}DecoderLayer
        self.layers = make_layers(4, lambda prefix: layer_type(prefix=prefix))

class {name}ForCausalLM(nn.Module):
    def __init__(self):
        self.model = self.make()

    def make(self):
        return {name}Model()
"""


def model(name: str) -> str:
    """A module with a decoder layer, a stack and a model class."""
    return (LAYER + STACK).format(name=name)


FILES = {
    "first": model("First"),
    # Runs the first model's stack with its own layer.
    "chosen": """
from .first import FirstForCausalLM, FirstModel
"""
    + LAYER.format(name="Chosen")
    + """
class ChosenForCausalLM(FirstForCausalLM):
    def make(self):
        return FirstModel(layer_type=ChosenDecoderLayer)
""",
    # A layer with its own parts, which runs the first layer's `forward`.
    "heir": """
from .first import FirstDecoderLayer, FirstForCausalLM, FirstModel

class HeirDecoderLayer(FirstDecoderLayer):
    def __init__(self, prefix):
        super().__init__()
        self.mlp = make_mlp(prefix)

class HeirForCausalLM(FirstForCausalLM):
    def make(self):
        return FirstModel(layer_type=HeirDecoderLayer)
""",
    "wrapping": """
from torch import nn
from .utils import init_vllm_registered_model

class NamedForCausalLM(nn.Module):
    def __init__(self):
        self.model = init_vllm_registered_model(architectures=["FirstForCausalLM"])

class AnyForCausalLM(nn.Module):
    def __init__(self, config):
        self.model = init_vllm_registered_model(hf_config=config)
""",
    # Refers to a layer without creating one.
    "empty": """
from torch import nn
from .first import FirstDecoderLayer

class EmptyForCausalLM(nn.Module):
    def is_one(self, layer):
        return isinstance(layer, FirstDecoderLayer)
""",
}
TABLES: dict[str, dict[str, tuple[str, str]]] = {
    "_TEXT_GENERATION_MODELS": {
        "FirstForCausalLM": ("first", "FirstForCausalLM"),
        "ChosenForCausalLM": ("chosen", "ChosenForCausalLM"),
        "HeirForCausalLM": ("heir", "HeirForCausalLM"),
        "AnyForCausalLM": ("wrapping", "AnyForCausalLM"),
    },
    "_MULTIMODAL_MODELS": {"NamedForCausalLM": ("wrapping", "NamedForCausalLM")},
    "_EMBEDDING_MODELS": {
        "FirstModel": ("first", "FirstForCausalLM"),
        "FirstForCausalLM": ("first", "FirstForCausalLM"),
    },
}
EMPTY = {"EmptyForCausalLM": ("empty", "EmptyForCausalLM")}


def registry(tables: Mapping[str, Mapping[str, tuple[str, str]]]) -> str:
    """The source of a registry with these tables."""
    lines = [f"{name} = {dict(table)!r}" for name, table in tables.items()]
    merged = ", ".join(f"**{name}" for name in tables)
    return "\n".join([*lines, f"_VLLM_MODELS = {{{merged}}}", ""])


def write(
    root: Path,
    tables: Mapping[str, Mapping[str, tuple[str, str]]] | None = None,
) -> Path:
    """Write the release below `root`."""
    folder = root / MODELS
    folder.mkdir(parents=True)
    for name, text in FILES.items():
        (folder / f"{name}.py").write_text(text)
    (folder / "registry.py").write_text(registry(TABLES if tables is None else tables))
    return root

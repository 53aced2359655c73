# SPDX-License-Identifier: Apache-2.0
"""Layers of the Transformers library, and synthetic ones, are woven when loaded."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXLayer
from transformers.models.olmo2.modeling_olmo2 import Olmo2DecoderLayer
from transformers.models.phi.modeling_phi import PhiDecoderLayer

from tests.support.models import randomise
from vllm.model_executor.layers.residual import tap as residual_tap
from vllm.model_executor.layers.residual.runtime_weave import NotWoven, weave_layer

WIDTH, TOKENS = 32, 5
POINTS = (
    "pre_attn",
    "post_attn",
    "post_block",
    "mlp_in",
    "mlp_out",
    "attn_add",
    "mlp_add",
)
SIZES: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 64,
    "attn_implementation": "eager",
}


def neox(parallel: bool) -> nn.Module:
    config = transformers.GPTNeoXConfig(use_parallel_residual=parallel, **SIZES)
    return GPTNeoXLayer(config, 0)


def phi() -> nn.Module:
    config = transformers.PhiConfig(**SIZES)
    config.rope_parameters["partial_rotary_factor"] = 1.0
    return PhiDecoderLayer(config, 0)


def olmo2() -> nn.Module:
    return Olmo2DecoderLayer(transformers.Olmo2Config(**SIZES), 0)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "parallel, two norms": lambda: neox(True),
    "sequential": lambda: neox(False),
    "parallel, one norm": phi,
    "norms after": olmo2,
}
ATTENTION = {"GPTNeoXLayer": "attention"}


class Tap:
    """Records the stream, then adds to it if asked to."""

    def __init__(self) -> None:
        self.seen = torch.empty(0)
        self.vector: torch.Tensor | None = None

    def __call__(
        self, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        self.seen = hidden if residual is None else hidden + residual
        if self.vector is None:
            return hidden, residual
        if residual is None:
            return hidden + self.vector, None
        return hidden, residual + self.vector


@pytest.fixture(params=LAYERS.values(), ids=LAYERS)
def layer(request: pytest.FixtureRequest) -> nn.Module:
    made: nn.Module = request.param().eval()
    randomise(made)
    return made


def run(layer: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Run one pass, without rotary embeddings."""
    heads = (torch.ones(1, TOKENS, 16), torch.zeros(1, TOKENS, 16))
    with torch.no_grad():
        output = layer(hidden, attention_mask=None, position_embeddings=heads)
    return output[0] if isinstance(output, tuple) else output


def stream() -> torch.Tensor:
    return torch.randn(1, TOKENS, WIDTH, generator=torch.Generator().manual_seed(3))


def tapped(layer: nn.Module) -> dict[str, Tap]:
    weave_layer(layer)
    taps = {point: Tap() for point in residual_tap.hook_points(layer)}
    for point, tap in taps.items():
        residual_tap.attach(layer, point, tap)  # type: ignore[arg-type]
    return taps


def test_a_layer_runs_as_before(layer: nn.Module) -> None:
    before = run(layer, stream())
    cls = type(layer)
    tapped(layer)
    assert isinstance(layer, cls)
    assert type(layer).__name__ == cls.__name__
    assert torch.equal(run(layer, stream()), before)


def test_the_points_hold_the_stream(layer: nn.Module) -> None:
    taps = tapped(layer)
    assert tuple(taps) == POINTS
    leaving = run(layer, stream())
    assert torch.equal(taps["pre_attn"].seen, stream())
    assert torch.equal(taps["post_block"].seen, leaving)


def test_a_change_at_a_point_is_one_made_where_it_comes_from(layer: nn.Module) -> None:
    taps = tapped(layer)
    vector = torch.linspace(-1, 1, WIDTH)
    entering = run(layer, stream() + vector)
    taps["pre_attn"].vector = vector
    torch.testing.assert_close(run(layer, stream()), entering)
    taps["pre_attn"].vector = None

    name = ATTENTION.get(type(layer).__name__, "self_attn")
    if isinstance(layer, Olmo2DecoderLayer):
        name = "post_attention_layernorm"

    def add(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (output[0] + vector, *output[1:])
        return output + vector

    handle = layer.get_submodule(name).register_forward_hook(add)
    behind = run(layer, stream())
    handle.remove()
    taps["post_attn"].vector = vector
    torch.testing.assert_close(run(layer, stream()), behind)


def test_a_woven_layer_is_compiled_whole(layer: nn.Module) -> None:
    taps = tapped(layer)
    taps["post_attn"].vector = torch.ones(WIDTH)
    expected = run(layer, stream())
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    torch.testing.assert_close(run(compiled, stream()), expected)


def test_layers_alike_share_a_class_and_others_do_not() -> None:
    layers = [neox(True), neox(True), neox(False)]
    for layer in layers:
        weave_layer(layer)
    one, same, other = map(type, layers)
    assert one is same
    assert one is not other


HEAD = """
import torch
from torch import nn

class Deep(nn.Module):
    kind = "plain"
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.attn, self.mlp = nn.Linear(4, 4), nn.Linear(4, 4)
"""
PLAIN = """
    def forward(self, hidden_states: "Unknown"):
        residual = hidden_states
        hidden_states = residual + self.attn(self.norm(hidden_states))
        hidden_states = hidden_states + self.mlp(self.norm(hidden_states))
        return hidden_states
"""


@pytest.fixture
def module(tmp_path: Path) -> Iterator[Callable[[str], ModuleType]]:
    """Create a module from source, like a plug-in's file."""
    names: list[str] = []

    def make(text: str) -> ModuleType:
        names.append(f"plugin_{len(names)}")
        path = tmp_path / f"{names[-1]}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(names[-1], path)
        assert spec is not None and spec.loader is not None
        made = importlib.util.module_from_spec(spec)
        sys.modules[names[-1]] = made
        spec.loader.exec_module(made)
        return made

    yield make
    for name in names:
        sys.modules.pop(name)


Make = Callable[[str], ModuleType]


def test_a_layer_of_a_plug_in_is_woven(module: Make) -> None:
    layer = module(HEAD + PLAIN).Deep()
    before = layer(torch.ones(1, 4))
    taps = tapped(layer)
    assert tuple(taps)[:3] == POINTS[:3]
    assert torch.equal(layer(torch.ones(1, 4)), before)
    assert torch.equal(taps["post_block"].seen, before)


def test_a_subclass_keeps_its_own_attributes(module: Make) -> None:
    layer = module(HEAD + PLAIN + '\nclass Deeper(Deep):\n    kind = "deep"\n').Deeper()
    weave_layer(layer)
    assert layer.kind == "deep"
    assert residual_tap.hook_points(layer)[:3] == POINTS[:3]


REFUSED = {
    "a sublayer of no known kind": (
        HEAD.replace("self.attn,", "self.gadget,")
        + PLAIN.replace("self.attn", "self.gadget"),
        "cannot tell what kind of sublayer self.gadget is",
    ),
    "a call of its base class": (
        HEAD
        + PLAIN.replace(
            "residual = hidden_states\n",
            "residual = hidden_states\n        super().eval()\n",
        ),
        "closure",
    ),
    "a name that is taken": (
        "residual_tap = None\n" + HEAD + PLAIN,
        "residual_tap of its own",
    ),
    "a default that was made in the class": (
        HEAD
        + PLAIN.replace("    def forward", "    width = 4\n    def forward").replace(
            '"Unknown"', '"Unknown", width=width'
        ),
        "cannot be recompiled",
    ),
}


@pytest.mark.parametrize(("text", "why"), REFUSED.values(), ids=REFUSED)
def test_a_layer_that_is_not_understood_is_left_alone(
    module: Make, text: str, why: str
) -> None:
    layer = module(text).Deep()
    cls = type(layer)
    with pytest.raises(NotWoven, match=why):
        weave_layer(layer)
    assert type(layer) is cls


def test_a_forward_that_was_replaced_is_left_alone(module: Make) -> None:
    layer = module(HEAD + PLAIN).Deep()
    layer.forward = lambda hidden_states: hidden_states
    with pytest.raises(NotWoven, match="its forward was replaced"):
        weave_layer(layer)


def test_a_class_that_no_module_names_is_left_alone(module: Make) -> None:
    made = module(HEAD + PLAIN)
    layer = made.Deep()
    del made.Deep
    with pytest.raises(NotWoven, match="top level"):
        weave_layer(layer)

# SPDX-License-Identifier: Apache-2.0
"""Where a model of the Transformers library keeps its residual stream.

Written by reading the library's models, and independent of where the fork puts its
taps. A `Recipe` says it for an architecture; `Recipe.points` finds the modules of one
layer.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

HOOKS = ("pre_attn", "post_attn", "post_block", "mlp_in", "mlp_out")
ORDER = HOOKS[:3]
"""The points of the stream, in the order a row passes them."""


@dataclass(frozen=True, slots=True)
class Spot:
    """A tensor that a module takes or gives."""

    module: nn.Module
    side: Literal["in", "out"]
    scale: float = 1.0
    """What one unit that is added here adds to the stream."""
    result: int = 0
    """Which of several results, on the side "out"."""
    run: int = 0
    """How many runs of the module in the same pass come before."""


@dataclass(frozen=True, slots=True)
class Point:
    """A hook point of one layer."""

    read: Spot
    change: Spot
    """Where to add what shall be added to the stream."""
    plus: str | None = None
    """The hook point whose value `read` comes on top of, times its scale."""
    minus: str | None = None
    """The hook point whose value `read` has on top."""
    also: Spot | None = None
    """A second tensor; the value is the sum."""

    def of_run(self, run: int) -> "Point":
        """The same in another run of the layer."""
        return replace(
            self,
            read=replace(self.read, run=run),
            change=replace(self.change, run=run),
            also=replace(self.also, run=run) if self.also else None,
        )


def named(layer: nn.Module, names: tuple[str, ...]) -> nn.Module | None:
    """The first of these submodules that the layer has."""
    for name in names:
        found: object = layer
        for part in name.split("."):
            found = getattr(found, part, None)
        if isinstance(found, nn.Module):
            return found
    return None


def _one(layer: nn.Module) -> float:
    return 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Names of submodules; of several the first that a layer has counts."""

    layers: str = "model.layers"
    attention: tuple[str, ...] = (
        "self_attn",
        "self_attention",
        "attn",
        "attention",
        "mamba",
        "linear_attn",
        "conv",
    )
    """What gives the attention's (or other mixer's) share of the stream."""
    middle: tuple[str, ...] = (
        "post_attention_layernorm",
        "pre_ff_layernorm",
        "feedforward_layernorm",
        "ffn_norm",
        "ln_2",
    )
    """What takes the stream after attention. Empty where no module does, as in
    parallel blocks: then it is computed as the sum."""
    mlp: tuple[str, ...] = ("mlp", "feed_forward", "block_sparse_moe", "ffn")
    mlp_in: tuple[str, ...] = ()
    """What gives the MLP's input, where several modules take it."""
    mlp_out: tuple[str, ...] = ()
    """What gives the MLP's output, where that is not `mlp`."""
    shared: tuple[str, ...] = ()
    """Experts beside `mlp` whose output is added to its."""
    scale: Callable[[nn.Module], float] = _one
    """The factor by which a layer adds its attention to the stream."""
    single: tuple[str, ...] = ()
    """Mixers of layers without an MLP: `post_attn` is `post_block` there."""
    order: Callable[[nn.Module], list[tuple[nn.Module, int]]] | None = None
    """The layers of a model that runs some several times, in the order of a pass, each
    with how many of its runs come before."""
    both_ways: bool = False
    """Whether the tokens of a prompt see those behind them."""
    own: Callable[[nn.Module, "Recipe"], Mapping[str, Point] | None] | None = None
    """Points of a layer that the names above do not describe; None: they do."""

    def runs(self, model: nn.Module) -> list[tuple[nn.Module, int]]:
        """Every run of a layer in a pass, and how many of that layer come before."""
        if self.order is not None:
            return self.order(model)
        layers = model.get_submodule(self.layers)
        assert isinstance(layers, nn.ModuleList)
        return [(layer, 0) for layer in layers]

    def points(self, layer: nn.Module) -> dict[str, Point]:
        """The hook points of one layer."""
        special = self.own(layer, self) if self.own is not None else None
        found = dict(self.ends(layer) if special is None else special)
        if special is not None:
            return found
        if named(layer, self.single) is not None:
            return found | {"post_attn": found["post_block"]}
        return found | self.branches(layer)

    def ends(self, layer: nn.Module) -> dict[str, Point]:
        """What enters and what leaves a layer."""
        entering, leaving = Spot(layer, "in"), Spot(layer, "out")
        return {
            "pre_attn": Point(entering, entering),
            "post_block": Point(leaving, leaving),
        }

    def branches(self, layer: nn.Module) -> dict[str, Point]:
        """What is between."""
        attention = named(layer, self.attention)
        assert attention is not None, f"no attention in {type(layer).__name__}"
        added = Spot(attention, "out", self.scale(layer))
        middle = named(layer, self.middle)
        if middle is None:
            found = {"post_attn": Point(added, added, plus="pre_attn")}
        else:
            found = {"post_attn": Point(Spot(middle, "in"), added)}
        mlp = named(layer, self.mlp)
        if mlp is not None:
            giving = named(layer, self.mlp_in)
            entering = Spot(giving, "out") if giving is not None else Spot(mlp, "in")
            leaving = Spot(named(layer, self.mlp_out) or mlp, "out")
            shared = named(layer, self.shared)
            also = Spot(shared, "out") if shared is not None else None
            found["mlp_in"] = Point(entering, entering)
            found["mlp_out"] = Point(leaving, leaving, also=also)
        return found


PLAIN = Recipe()
"""Attention, add, norm, MLP, add: as in Llama."""

PARALLEL = Recipe(middle=())
"""Attention and MLP side by side, on the same stream."""

SANDWICH = Recipe(
    attention=("post_attention_layernorm",), middle=("pre_feedforward_layernorm",)
)
"""Norms before and after both branches: as in Gemma 2."""

POST_NORM = Recipe(attention=("post_attention_layernorm",), middle=("mlp",))
"""Norms only after the branches: as in Olmo 2."""


def multiplied(layer: nn.Module) -> float:
    """The factor of layers that scale both branches, as Granite's."""
    return float(layer.residual_multiplier)  # type: ignore[arg-type]


SCALED = Recipe(scale=multiplied)

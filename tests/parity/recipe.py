# SPDX-License-Identifier: Apache-2.0
"""The places of the residual stream in models of the Transformers library.

They were determined from the library's source, independent of the fork's taps. A
`Recipe` describes an architecture; `Recipe.points` finds the modules of one layer.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

ORDER = ("pre_attn", "post_attn", "post_block")
"""The points of the stream, in the order of a pass."""
STREAMS = ("streams_pre", "streams_post")
"""The points of a residual of several streams, in the order of a pass."""
HOOKS = (*ORDER, "mlp_in", "mlp_out", *STREAMS)
ADDED = ("embed", "attn_add", "mlp_add")
"""What enters the stream: its points, which are compared, are sums of these."""


@dataclass(frozen=True, slots=True)
class Spot:
    """A tensor that is an input or output of a module."""

    module: nn.Module
    side: Literal["in", "out"]
    scale: float = 1.0
    """The change of the stream per unit that is added here."""
    result: int = 0
    """Index of the result, on the side "out"."""
    run: int = 0
    """Number of earlier runs of the module in the same pass."""
    axis: int | None = None
    """The axis of the streams, if the tensor has several; a row has all of them."""

    def rows(self, hidden: torch.Tensor) -> torch.Tensor:
        """The rows `[tokens, width]` of the tensor, float32."""
        if self.axis is not None:
            hidden = hidden.movedim(self.axis, -2).flatten(-2)
        return hidden.detach().float().reshape(-1, hidden.shape[-1])

    def plus(self, hidden: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        """The tensor with a row added to that of each token."""
        if self.axis is None:
            return hidden + row
        parts = hidden.movedim(self.axis, -2)
        return (parts + row.view(parts.shape[-2:])).movedim(-2, self.axis)


@dataclass(frozen=True, slots=True)
class Point:
    """A hook point of one layer."""

    read: Spot
    change: Spot
    """Where to add a change of the stream."""
    plus: str | None = None
    """The hook point to whose value `read`, times its scale, is added."""
    minus: str | None = None
    """The hook point whose value is subtracted from `read`."""
    also: Spot | None = None
    """A second tensor; the value is the sum."""

    def of_run(self, run: int) -> "Point":
        """The same point in another run of the layer."""
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


def _ids(ids: torch.Tensor, num_prompt_tokens: int) -> Mapping[str, torch.Tensor]:
    return {"input_ids": ids}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Names of submodules; of several names, the first that a layer has is used."""

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
    """Modules whose output is the contribution of attention or another mixer."""
    middle: tuple[str, ...] = (
        "post_attention_layernorm",
        "pre_ff_layernorm",
        "feedforward_layernorm",
        "ffn_norm",
        "ln_2",
    )
    """Modules whose input is the stream after attention. Empty if there is none, as in
    parallel blocks: then it is computed as the sum."""
    mlp: tuple[str, ...] = ("mlp", "feed_forward", "block_sparse_moe", "ffn")
    mlp_in: tuple[str, ...] = ()
    """Modules whose output is the MLP's input, if several modules read it."""
    mlp_out: tuple[str, ...] = ()
    """Modules whose output is the MLP's output, if it is not `mlp`."""
    shared: tuple[str, ...] = ()
    """Experts next to `mlp`, whose output is added to its output."""
    scale: Callable[[nn.Module], float] = _one
    """The factor of the attention's contribution to the stream."""
    single: tuple[str, ...] = ()
    """Mixers of layers without an MLP: `post_attn` is `post_block` there."""
    order: Callable[[nn.Module], list[tuple[nn.Module, int]]] | None = None
    """The layers of a model that runs some of them several times, in the order of a
    pass, each with the number of its earlier runs."""
    sums: bool = True
    """Whether a block adds to the stream, and does nothing else to it."""
    given: Callable[[torch.Tensor, int], Mapping[str, torch.Tensor]] = _ids
    """What the library's model is given for token ids, `[1, tokens]`, of which so many
    are the prompt's."""
    own: Callable[[nn.Module, "Recipe"], Mapping[str, Point] | None] | None = None
    """The points of a layer, if the names above do not describe them."""

    def runs(self, model: nn.Module) -> list[tuple[nn.Module, int]]:
        """Every run of a layer in a pass, with the number of its earlier runs."""
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
        """The points at the start and the end of a layer."""
        entering, leaving = Spot(layer, "in"), Spot(layer, "out")
        return {
            "pre_attn": Point(entering, entering),
            "post_block": Point(leaving, leaving),
        }

    def branches(self, layer: nn.Module) -> dict[str, Point]:
        """The points between a layer's start and end."""
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
"""Attention and MLP in parallel, on the same stream."""

SANDWICH = Recipe(
    attention=("post_attention_layernorm",), middle=("pre_feedforward_layernorm",)
)
"""Norms before and after both branches: as in Gemma 2."""

POST_NORM = Recipe(attention=("post_attention_layernorm",), middle=("mlp",))
"""Norms only after the branches: as in Olmo 2."""


def multiplied(layer: nn.Module) -> float:
    """A recipe for layers that scale both branches, like Granite's."""
    return float(layer.residual_multiplier)  # type: ignore[arg-type]


SCALED = Recipe(scale=multiplied)

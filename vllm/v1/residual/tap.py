# SPDX-License-Identifier: Apache-2.0
"""Places of the model at which the residual stream is read or changed.

Besides their names: how many numbers a row has there, and how other libraries name
them. Accepted forms of an address, which names the hook point of one layer:

    resid_post.10               interp-engine
    blocks.10.hook_resid_post   TransformerLens 1 to 3, SAELens
    blocks.10.hook_out          TransformerLens 4
    post_block.10               ours

This module imports nothing of ours, because `vllm.sampling_params` imports it.
"""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias, get_args

InnerPoint = Literal[
    "attn_in",
    "q",
    "k",
    "v",
    "z",
    "attn_out",
    "mlp_act",
    "router_logits",
    "expert_ids",
    "expert_weights",
    "final_norm",
    "embed",
    "attn_add",
    "mlp_add",
]
MLPPoint = Literal["mlp_in", "mlp_out"]
StreamsPoint = Literal["streams_pre", "streams_post"]
HookName = Literal[
    "pre_attn", "post_attn", "post_block", StreamsPoint, MLPPoint, InnerPoint
]
"""The point in a decoder block at which a row is read.

`pre_attn`: the residual stream at the input of the block. `post_attn`: after the output
of attention (or another token mixer) was added. `post_block`: at the output of the
block, before any final norm. `mlp_in`, `mlp_out`: input and output of the MLP.

`streams_pre`, `streams_post`: of a model whose residual is several streams, and which
has none of these three: all streams, one after the other, as they enter and leave the
block.

Inside the block, only where enabled: `attn_in`, `attn_out`: input and output of the
attention module. `q`, `k`, `v`: what attention reads, after rotary embeddings and
norms, `z`: what it returns, before the output projection; each consists of heads.
`mlp_act`: input of the MLP's second projection. `router_logits`: one per expert.
`expert_ids`, `expert_weights`: the router's choice, one number per chosen expert.
`final_norm`: of the last layer, what enters the unembedding. `embed`: of layer 0, the
embeddings as they enter the stream. `attn_add`, `mlp_add`: what is added to the stream,
after norms and multipliers of the branch.
"""

STREAMS_POINTS: tuple[HookName, ...] = get_args(StreamsPoint)
INNER_POINTS: tuple[HookName, ...] = (*STREAMS_POINTS, *get_args(InnerPoint))
"""Points whose rows may have another width than the hidden size; programs act there,
tables of added vectors do not."""
READ_ONLY: tuple[HookName, ...] = ("expert_ids",)
"""Points whose numbers nothing may change."""
MLP_POINTS: tuple[HookName, ...] = get_args(MLPPoint)
OPTIONAL_POINTS: tuple[HookName, ...] = (*MLP_POINTS, *get_args(InnerPoint))
"""Points that exist only where the engine was started with them."""

HOOK_NAMES: tuple[HookName, ...] = get_args(HookName)

Tap: TypeAlias = tuple[int, str]
"""`(layer, hook)`: the 0-based layer, and one of `HOOK_NAMES`."""

AFTER = "after"
"""Of `--hook-points`: rows behind the interventions of every point.

Those of `post_block` need no point of their own: a block hands its stream on unchanged,
so they are read where the next block begins, and only the last block reads twice.
"""


def behind(tap: Tap, last_layer: int) -> Tap:
    """Where the stream is read behind what is done at `tap`."""
    layer, hook = tap
    if hook == "post_block" and layer < last_layer:
        return layer + 1, "pre_attn"
    return layer, f"{hook}.{AFTER}"


def in_front(tap: Tap) -> Tap:
    """The tap that `behind` maps to `tap`."""
    layer, hook = tap
    if hook.endswith(AFTER):
        return layer, hook.removesuffix(f".{AFTER}")
    return layer - 1, "post_block"


class PointShape(NamedTuple):
    """The rows of a hook point."""

    width: int
    """Numbers per row."""
    heads: int = 0
    """How many heads the row consists of, one after the other; 0 if it has none."""

    @property
    def head_size(self) -> int:
        """Numbers per head."""
        return self.width // self.heads


Shapes: TypeAlias = Mapping[int, Mapping[str, tuple[int, int]]]
"""By layer and hook point, `PointShape` of the points that have heads or another width
than the stream."""
NO_SHAPES: Shapes = MappingProxyType({})


def shape_of(shapes: Shapes, tap: Tap, hidden_size: int) -> PointShape:
    """The shape of a hook point's rows.

    Args:
        shapes: of the model.
        tap: the hook point.
        hidden_size: the width of the stream, which all other points have.

    """
    layer, hook = tap[0], tap[1].removesuffix(f".{AFTER}")
    return PointShape(*shapes.get(layer, {}).get(hook, (hidden_size, 0)))


def width_at(
    shapes: Shapes, hidden_size: int, tap: Tap, heads: Sequence[int] = ()
) -> int:
    """Numbers per row at a hook point, or per part of it that is of some heads."""
    shape = shape_of(shapes, tap, hidden_size)
    return len(heads) * shape.head_size if heads else shape.width


def other_widths(
    shapes: Shapes, taps: Iterable[Tap], hidden_size: int
) -> dict[Tap, tuple[int, int]]:
    """Of the taps whose rows are not as wide as the stream: how rows are staged.

    Returns:
        The staging rows that a row takes, each as wide as the stream, and its width.

    """
    widths = {tap: shape_of(shapes, tap, hidden_size).width for tap in taps if shapes}
    return {
        tap: (-(-width // hidden_size), width)
        for tap, width in widths.items()
        if width != hidden_size
    }


ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "resid_pre": "pre_attn",
        "resid_mid": "post_attn",
        "resid_post": "post_block",
        "hook_resid_pre": "pre_attn",
        "hook_resid_mid": "post_attn",
        "hook_resid_post": "post_block",
        "hook_in": "pre_attn",
        "ln2.hook_in": "post_attn",
        "hook_out": "post_block",
        "hook_embed": "embed",
        "hook_attn_out": "attn_add",
        "hook_mlp_out": "mlp_add",
        **{f"{of}hook_{name}": name for name in "qkvz" for of in ("", "attn.")},
        "mlp.hook_post": "mlp_act",
        "mlp.hook_in": "mlp_in",
        "mlp.hook_out": "mlp_out",
    }
)
"""Our hook point for each name in another library.

TransformerLens' `hook_mlp_in` is not included: it is the stream before the norm, while
`mlp_in` is the input of the MLP, after the norm.
"""

NOTHING: Mapping[str, str] = MappingProxyType({})

_MODULES: Mapping[str, str] = MappingProxyType(
    {
        "": "post_block",
        "input_layernorm": "pre_attn",
        "ln_1": "pre_attn",
        "post_attention_layernorm": "post_attn",
        "ln_2": "post_attn",
        "mlp": "mlp_out",
    }
)
"""What the output of a Transformers module, or the input of a norm, is here."""

_OF_MODULE = re.compile(r"(?:model\.|transformer\.)?(?:layers|h)\.(\d{1,6})\.?(\w*)")
_OF_BLOCK = re.compile(r"blocks\.(0|[1-9]\d{0,5})\.([a-z][a-z0-9_.]*)")
_WITH_LAYER = re.compile(r"([a-z][a-z0-9_]*)\.(0|[1-9]\d{0,5})")


def hook_name(name: str) -> str | None:
    """Our name of the hook point `name`; None if it is unknown."""
    return name if name in HOOK_NAMES else ALIASES.get(name)


def why_not(hook: str, missing: Mapping[str, str] = NOTHING) -> str:
    """The end of a message that a layer does not have a hook point.

    Args:
        hook: its name.
        missing: the reasons why no layer of the model has an enabled point.

    """
    if hook in missing:
        return f"; this model does not have {hook}: {missing[hook]}"
    if hook not in OPTIONAL_POINTS:
        return ""
    return f"; a server with --hook-points {hook} has it where the model does"


def resolve_tap(layer: int | None, hook: str) -> tuple[int | None, str] | None:
    """The layer and our hook point that a `layer` and a `hook` mean together.

    Args:
        layer: a 0-based layer, or None if only `hook` may name one.
        hook: a hook point's name, or an address.

    Returns:
        None if the name is unknown, or if it is an address of another layer.

    """
    if (tap := parse_address(hook)) is not None:
        return tap if layer in (None, tap[0]) else None
    name = hook_name(hook)
    return None if name is None else (layer, name)


def parse_address(text: str) -> Tap | None:
    """Parse an address to `(layer, hook)`; None if `text` is not one.

    The layer is 0-based and not checked against a model.
    """
    if found := _OF_BLOCK.fullmatch(text):
        layer, name = found.groups()
        hook = ALIASES.get(name)
    elif found := _WITH_LAYER.fullmatch(text):
        name, layer = found.groups()
        hook = hook_name(name)
    else:
        return None
    return None if hook is None else (int(layer), hook)


def did_you_mean(name: object) -> str:
    """The end of a message that `name` is unknown: what was probably meant, if known.

    Modules of the Transformers library, such as `model.layers.3.mlp`, and names that
    are misspelt are recognised.
    """
    if not isinstance(name, str):
        return ""
    if found := _OF_MODULE.fullmatch(name):
        layer, module = found.groups()
        meant = f"{_MODULES[module]}.{layer}" if module in _MODULES else None
    else:
        known = difflib.get_close_matches(name, [*HOOK_NAMES, *ALIASES], 1, 0.75)
        meant = known[0] if known else None
    return "" if meant is None else f". Did you mean {meant!r}?"

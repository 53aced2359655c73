# SPDX-License-Identifier: Apache-2.0
"""Names of hook points in other libraries, with and without a layer.

Accepted forms of an address, which names the hook point of one layer:

    resid_post.10               interp-engine
    blocks.10.hook_resid_post   TransformerLens 1 to 3, SAELens
    blocks.10.hook_out          TransformerLens 4
    post_block.10               ours
"""

import difflib
import re
from collections.abc import Mapping
from types import MappingProxyType

from vllm.v1.residual.tap import HOOK_NAMES, OPTIONAL_POINTS, Tap

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

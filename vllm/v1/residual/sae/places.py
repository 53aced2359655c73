# SPDX-License-Identifier: Apache-2.0
"""Converts other projects' names of places to our hook points."""

import re

from vllm.v1.residual.sae.record import SAEPlace
from vllm.v1.residual.tap import Tap

TRANSFORMER_LENS = {
    "hook_resid_pre": "pre_attn",
    "hook_resid_mid": "post_attn",
    "hook_resid_post": "post_block",
    "hook_attn_out": "attn_add",
    "hook_mlp_out": "mlp_add",
}
"""TransformerLens counts blocks from 0 too. `hook_mlp_in` and `ln2.hook_normalized` are
excluded: whether they contain the norm's weights depends on how a model was loaded."""

_TRANSFORMER_LENS = re.compile(r"blocks\.(\d{1,4})\.(\w+)")

TRANSFORMERS = {
    "output": "post_block",
    "pre_feedforward_layernorm.output": "mlp_in",
    "mlp.output": "mlp_out",
    "post_feedforward_layernorm.output": "mlp_add",
}
"""The names after `model.layers.N.` in Gemma Scope 2's configurations. Blocks that have
the last of these norms add its output to the stream as it is."""

_TRANSFORMERS = re.compile(r"model\.layers\.(\d{1,4})\.([\w.]+)")

MODULES = {"": "post_block", "mlp": "mlp_out"}
"""The names after the block's number in sparsify's folders: a module's output."""

_MODULES = re.compile(r"(?:[\w.]+\.)?(?:layers|h|blocks)[._](\d{1,4})(?:\.(\w+))?")


def transformer_lens(name: str) -> SAEPlace:
    """The place of a name such as `blocks.8.hook_resid_post`."""
    return SAEPlace(name, _tap(_TRANSFORMER_LENS, TRANSFORMER_LENS, name))


def transformers(name: str) -> SAEPlace:
    """The place of a name such as `model.layers.8.output`."""
    return SAEPlace(name, _tap(_TRANSFORMERS, TRANSFORMERS, name))


def module_output(name: str) -> SAEPlace:
    """The place of the output of a module such as `layers.8` or `layers.8.mlp`."""
    return SAEPlace(name, _tap(_MODULES, MODULES, name))


def module_input(name: str) -> SAEPlace:
    """The place of a module's input, which transcoders read."""
    return SAEPlace(name, _tap(_MODULES, {"": "pre_attn", "mlp": "mlp_in"}, name))


def _tap(pattern: re.Pattern[str], known: dict[str, str], name: str) -> Tap | None:
    found = pattern.fullmatch(name)
    hook = None if found is None else known.get(found[2] or "")
    return None if found is None or hook is None else (int(found[1]), hook)


def numbered(pattern: str, text: str) -> int | None:
    """The number in the first group of the pattern in a path."""
    found = re.search(pattern, text)
    return None if found is None else int(found[1])


def residual_after(layer: int | None, name: str) -> SAEPlace:
    """The stream after a block, if the layer is known."""
    return SAEPlace(name, None if layer is None else (layer, "post_block"))

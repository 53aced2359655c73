# SPDX-License-Identifier: Apache-2.0
"""A place of the model at which the residual stream is read or changed.

This module imports nothing of ours, because `vllm.sampling_params` imports it.
"""

from typing import Literal, TypeAlias

HookName = Literal["pre_attn", "post_attn", "post_block", "mlp_in", "mlp_out"]
"""The point in a decoder block at which a row is read.

`pre_attn`: the residual stream at the input of the block. `post_attn`: after the output
of attention (or another token mixer) was added. `post_block`: at the output of the
block, before any final norm. `mlp_in`, `mlp_out`: input and output of the MLP.
"""

HOOK_NAMES: tuple[HookName, ...] = (
    "pre_attn",
    "post_attn",
    "post_block",
    "mlp_in",
    "mlp_out",
)

Tap: TypeAlias = tuple[int, str]
"""`(layer, hook)`: the 0-based layer, and one of `HOOK_NAMES`."""

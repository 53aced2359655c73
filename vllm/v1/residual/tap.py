# SPDX-License-Identifier: Apache-2.0
"""A place of the model at which the residual stream is read or changed.

This module imports nothing of ours, because `vllm.sampling_params` imports it.
"""

from typing import Literal, TypeAlias, get_args

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

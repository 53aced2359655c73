# SPDX-License-Identifier: Apache-2.0
"""Sweeps under the names that TransformerLens gives them.

Each takes the arguments of `patch_sweep` except `hooks`, and those that its name says.
Those inside the block need `--hook-points`, and `attn_head` ones patch heads. Patching
what a module returns has the same effect as patching what is added to the stream, as
TransformerLens does: a norm or a multiplier between the two is a function of the row.
"""

from typing import TYPE_CHECKING, Any

from vllm.patching.result import PatchResult
from vllm.patching.sweeps import Text, patch_sweep

if TYPE_CHECKING:
    from collections.abc import Callable


def _preset(hook: str, **chosen: Any) -> "Callable[..., PatchResult]":
    def preset(llm: Any, clean: Text, corrupt: Text, **axes: Any) -> PatchResult:
        return patch_sweep(llm, clean, corrupt, hooks=hook, **{**chosen, **axes})

    preset.__doc__ = f"`patch_sweep` at `{hook}`."
    return preset


get_act_patch_resid_pre = _preset("hook_resid_pre")
get_act_patch_resid_mid = _preset("hook_resid_mid")
get_act_patch_attn_out = _preset("attn_out")
get_act_patch_mlp_out = _preset("mlp_out")
get_act_patch_attn_head_out_by_pos = _preset("hook_z", heads="all")
get_act_patch_attn_head_out_all_pos = _preset(
    "hook_z", heads="all", positions="together"
)
get_act_patch_attn_head_q_all_pos = _preset("hook_q", heads="all", positions="together")
get_act_patch_attn_head_k_all_pos = _preset("hook_k", heads="all", positions="together")
get_act_patch_attn_head_v_all_pos = _preset("hook_v", heads="all", positions="together")

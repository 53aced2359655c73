# SPDX-License-Identifier: Apache-2.0
"""Models of the Transformers library call attention layers as modules."""

from fork.language import replace

EDITS = [
    replace(
        scope=scope,
        anchor="self_attn.forward",
        by="self_attn",
        why="Hook points inside the block are hooks, which `forward` does not call.",
    )
    for scope in ("vllm_attention_forward", "vllm_mla_attention_forward")
]

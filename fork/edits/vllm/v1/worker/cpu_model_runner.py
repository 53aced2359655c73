# SPDX-License-Identifier: Apache-2.0
"""The V1 CPU runner loads its model by itself."""

from fork.language import add_import, last, replace

EDITS = [
    add_import(
        "from vllm.v1.kv_cache_interface import AttentionSpec",
        why="What all kinds of attention have.",
    ),
    add_import(
        "from vllm.v1.worker import residual_stream",
        why="The runners' access to the residual stream.",
    ),
    last(
        scope="CPUModelRunner.load_model",
        insert="""
self.residual = residual_stream.open_residual_stream(
    self.vllm_config, self.model, self.device
)
""",
        why="Before the model is compiled.",
    ),
    replace(
        scope="CPUModelRunner._zero_block_ids",
        anchor="FullAttentionSpec",
        by="AttentionSpec",
        why="Suspect blocks may belong to layers with a sliding window, too.",
    ),
]

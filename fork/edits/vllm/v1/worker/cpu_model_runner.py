# SPDX-License-Identifier: Apache-2.0
"""The V1 CPU runner, which has its own `load_model`."""

from fork.language import add_import, last, replace

EDITS = [
    add_import(
        "from vllm.v1.kv_cache_interface import AttentionSpec",
        why="The common base class of attention specs.",
    ),
    add_import(
        "from vllm.v1.worker import residual_open",
        why="The runners' interface to capture and steering.",
    ),
    last(
        scope="CPUModelRunner.load_model",
        insert="""
self.residual = residual_open.open_residual_stream(
    self.vllm_config, self.model, self.device
)
""",
        why="Must precede compilation.",
    ),
    replace(
        scope="CPUModelRunner._zero_block_ids",
        anchor="FullAttentionSpec",
        by="AttentionSpec",
        why="Cleared blocks may also belong to layers with a sliding window.",
    ),
]

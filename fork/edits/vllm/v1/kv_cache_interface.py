# SPDX-License-Identifier: Apache-2.0
"""Blocks are cleared where clients can change the residual stream."""

from fork.language import add_field, first

EDITS = [
    add_field(
        scope="KVCacheConfig",
        after="kv_tp_replicas",
        insert="""
holds_changed_streams: bool = False
\"\"\"Whether clients may send vectors or embeddings: blocks may have NaN then.\"\"\"
""",
        why="The scheduler and the workers must agree.",
    ),
    first(
        scope="KVCacheConfig.needs_kv_cache_zeroing",
        insert="""
if self.holds_changed_streams:
    return True
""",
        why="Upstream then sends new blocks to the workers, which clear them.",
    ),
]

# SPDX-License-Identifier: Apache-2.0
"""Captured prompt positions are recomputed instead of read from the prefix cache."""

from fork.language import add_import, after, before

EDITS = [
    add_import(
        "from vllm.v1.capture.core.scheduler import cacheable_tokens, note_forgone",
        why="Limits the reuse of cached blocks.",
    ),
    after(
        scope="KVCacheManager.get_computed_blocks",
        anchor="max_cache_hit_length = request.num_tokens - 1",
        insert=(
            "max_cache_hit_length = cacheable_tokens(request, max_cache_hit_length)"
        ),
        why="A cached block has no rows to capture.",
    ),
    before(
        scope="KVCacheManager.get_computed_blocks",
        anchor="blocks = self.create_kv_cache_blocks(computed_blocks)",
        insert="note_forgone(self, request, num_new_computed_tokens)",
        why="Counts the tokens that capture recomputes.",
    ),
]

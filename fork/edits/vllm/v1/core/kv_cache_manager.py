# SPDX-License-Identifier: Apache-2.0
"""Which blocks are read from the prefix cache, and which are shared by it."""

from fork.language import add_import, after, before

EDITS = [
    add_import(
        """
from vllm.v1.capture.core.scheduler import cacheable_tokens, note_forgone
from vllm.v1.steering.core.generated_blocks import sharable
""",
        why="Limit the reuse of cached blocks, and which blocks are shared.",
    ),
    after(
        scope="KVCacheManager.get_computed_blocks",
        anchor="max_cache_hit_length = request.num_tokens - 1",
        insert=(
            "max_cache_hit_length = cacheable_tokens(request, max_cache_hit_length)"
        ),
        why="A cached block has no rows to capture.",
    ),
    after(
        scope="KVCacheManager.allocate_slots",
        anchor="num_tokens_to_cache = min(...)",
        insert="""
num_tokens_to_cache = sharable(request, total_computed_tokens, num_tokens_to_cache)
""",
        why="It is not known yet what steers the tokens of this step.",
    ),
    before(
        scope="KVCacheManager.get_computed_blocks",
        anchor="blocks = self.create_kv_cache_blocks(computed_blocks)",
        insert="note_forgone(self, request, num_new_computed_tokens)",
        why="Counts the tokens that capture recomputes.",
    ),
]

# SPDX-License-Identifier: Apache-2.0
"""A captured prompt position is computed, not taken from the prefix cache."""

from fork.language import add_import, after

EDITS = [
    add_import(
        "from vllm.v1.capture.scheduling import cacheable_tokens",
        why="Knows where reuse must end.",
    ),
    after(
        scope="KVCacheManager.get_computed_blocks",
        anchor="max_cache_hit_length = request.num_tokens - 1",
        insert=(
            "max_cache_hit_length = cacheable_tokens(request, max_cache_hit_length)"
        ),
        why="A cached block has no rows to capture.",
    ),
]

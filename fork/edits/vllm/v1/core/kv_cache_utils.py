# SPDX-License-Identifier: Apache-2.0
"""The hash of a block includes the steering of its tokens."""

from fork.language import add_import, before

EDITS = [
    add_import(
        "from vllm.v1.steering.core import prefix_cache as steering_caching",
        why="Describes the steering of a block.",
    ),
    before(
        scope="generate_block_hash_extra_keys",
        anchor="if not extra_keys:",
        insert=(
            "extra_keys += steering_caching.extra_keys("
            "request, start_token_idx, end_token_idx)"
        ),
        why="Steered and unsteered keys and values must not be confused.",
    ),
]

# SPDX-License-Identifier: Apache-2.0
"""The hash of a block includes the steering of its tokens, and loads of weights."""

from fork.language import add_import, before

EDITS = [
    add_import(
        "from vllm.v1.residual.core import block_keys",
        why="Describes what computes a block.",
    ),
    before(
        scope="generate_block_hash_extra_keys",
        anchor="if not extra_keys:",
        insert=(
            "extra_keys += block_keys.extra_keys("
            "request, start_token_idx, end_token_idx)"
        ),
        why="Keys and values of other vectors or weights must not be confused.",
    ),
]

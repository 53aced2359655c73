# SPDX-License-Identifier: Apache-2.0
"""Cohere's chat requests do not support our fields and reject them."""

from fork.language import add_import, last

EDITS = [
    add_import(
        "from vllm.entrypoints.serve.utils.residual_fields import refusing",
        why="Rejects unsupported fields.",
    ),
    last(
        scope="CohereChatV2Request",
        insert="_refuse_ours = refusing()",
        why="A field must not be silently ignored.",
    ),
]

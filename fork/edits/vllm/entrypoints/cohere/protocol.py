# SPDX-License-Identifier: Apache-2.0
"""Cohere's chats cannot carry our fields and refuse them."""

from fork.language import add_import, last

EDITS = [
    add_import(
        "from vllm.entrypoints.serve.utils.residual_fields import refusing",
        why="Knows the fields.",
    ),
    last(
        scope="CohereChatV2Request",
        insert="_refuse_ours = refusing()",
        why="A field that would be ignored is an error.",
    ),
]

# SPDX-License-Identifier: Apache-2.0
"""Messages cannot carry our fields and refuse them."""

from fork.language import add_import, last

EDITS = [
    add_import(
        "from vllm.entrypoints.serve.utils.residual_fields import refusing",
        why="Knows the fields.",
    ),
    last(
        scope="AnthropicMessagesRequest",
        insert="_refuse_ours = refusing()",
        why="A field that would be ignored is an error.",
    ),
]

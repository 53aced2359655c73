# SPDX-License-Identifier: Apache-2.0
"""Error messages have a maximum length."""

from fork.language import add_import, replace

EDITS = [
    add_import(
        "from vllm.v1.residual import bounds",
        why="Bounds the length of messages.",
    ),
    replace(
        scope="create_error_response",
        anchor="sanitize_message(message)",
        by="bounds.cut(\n"
        "    sanitize_message(bounds.cut(message, bounds.MAX_SANITIZED)),\n"
        "    bounds.MAX_RESPONSE_MESSAGE,\n"
        ")",
        why="Some messages repeat what the client sent, such as a model's name, which "
        "may be long to search for paths.",
    ),
]

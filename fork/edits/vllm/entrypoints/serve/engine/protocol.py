# SPDX-License-Identifier: Apache-2.0
"""Requests that do not support our fields reject them."""

from fork.language import add_import, first

EDITS = [
    add_import(
        "from vllm.entrypoints.serve.utils.residual_fields import check_body",
        why="Rejects unsupported fields.",
    ),
    first(
        scope="OpenAIBaseModel.__log_extra_fields__",
        insert="""
if cls.__name__.endswith("Request"):
    check_body(cls, data)
""",
        why="A field must not be silently ignored. The check is only for requests: "
        "streamed chunks also pass here, one per token.",
    ),
]

# SPDX-License-Identifier: Apache-2.0
"""Requests that cannot carry our fields refuse them."""

from fork.language import add_import, first

EDITS = [
    add_import(
        "from vllm.entrypoints.serve.utils.residual_fields import check_body",
        why="Knows the fields.",
    ),
    first(
        scope="OpenAIBaseModel.__log_extra_fields__",
        insert="""
if cls.__name__.endswith("Request"):
    check_body(cls, data)
""",
        why="A field that would be ignored is an error. Chunks of streams, which come "
        "by here as well, are as many as tokens.",
    ),
]

# SPDX-License-Identifier: Apache-2.0
"""Our fields belong into the sampling parameters of requests made of tokens."""

from fork.language import add_import, last

EDITS = [
    add_import(
        "from vllm.v1.capture.http import refusing",
        why="Knows the fields.",
    ),
    last(
        scope="GenerateRequest",
        insert="_refuse_ours = refusing()",
        why="A field that would be ignored is an error.",
    ),
]

# SPDX-License-Identifier: Apache-2.0
"""A worker that stops flushes what it has captured."""

from fork.language import add_import, first

EDITS = [
    add_import(
        "from vllm.v1.worker import residual_stream",
        why="The runners' access to the residual stream.",
    ),
    first(
        scope="Worker.shutdown",
        insert="residual_stream.close(self)",
        why="Rows that are under way reach their consumers before the process ends.",
    ),
]

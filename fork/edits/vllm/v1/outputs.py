# SPDX-License-Identifier: Apache-2.0
"""A step's output carries what its requests read out."""

from fork.language import add_field, add_import

EDITS = [
    add_import(
        "from vllm.v1.readouts.plan import RequestReadouts",
        why="The type of the field.",
    ),
    add_field(
        scope="ModelRunnerOutput",
        after="sampling_masks",
        insert="""
# By request id: what the step found out for its readouts
readouts: dict[str, RequestReadouts] | None = None
""",
        why="The scheduler may end a request because of it.",
    ),
]

# SPDX-License-Identifier: Apache-2.0
"""A step's output carries the readouts of its requests."""

from fork.language import add_field, add_import

EDITS = [
    add_import(
        "from vllm.v1.residual.core.messages import "
        "Acting, Action, Fired, StepReadouts, StepReceipt",
        why="The types of the fields.",
    ),
    add_field(
        scope="ModelRunnerOutput",
        after="sampling_masks",
        insert="""
# Results of the step's readouts
readouts: StepReadouts | None = None
# What steering did to the tokens of requests with a receipt, by request id
receipts: dict[str, StepReceipt] | None = None
# Tokens at which conditions of steering have fired
fired: Fired | None = None
# What consumers within the step want, if the scheduler passes it on to all ranks
actions: list[Action] | None = None
# What consumers made act in the step; None if nothing
acting: Acting | None = None
# Requests that must end because steering failed, with the reasons
failed: dict[str, str] | None = None
""",
        why="The scheduler evaluates stop conditions on them.",
    ),
]

# SPDX-License-Identifier: Apache-2.0
"""The scheduler output carries finished captures and changes of steering."""

from fork.language import add_field

EDITS = [
    add_field(
        scope="SchedulerOutput",
        after="kv_connector_block_state",
        insert="""
# CaptureStep or None, SteeringStep or None, whether a running request has vectors or
# embeddings from a client
residual: tuple = (None, None, False)
""",
        why="Reaches every worker after the steps that computed the rows.",
    ),
]

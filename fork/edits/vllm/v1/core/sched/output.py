# SPDX-License-Identifier: Apache-2.0
"""The scheduler output carries finished captures and changes of steering."""

from fork.language import add_field, add_import

EDITS = [
    add_import("from typing import Any", why="The type of the fields."),
    add_field(
        scope="SchedulerOutput",
        after="kv_connector_block_state",
        insert="""
# Ends of captured requests, and changes of the activation store: CaptureStep
capture: Any = None
# New steered requests, and slots to load: SteeringStep
steering: Any = None
# Whether a running request has vectors or embeddings from a client
checks_streams: bool = False
""",
        why="Reaches every worker after the steps that computed the rows.",
    ),
]

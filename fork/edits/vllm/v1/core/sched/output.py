# SPDX-License-Identifier: Apache-2.0
"""Ends of captures and changes of steering travel to the workers with a step."""

from fork.language import add_field, add_import

EDITS = [
    add_import("from typing import Any", why="The type of the fields."),
    add_field(
        scope="SchedulerOutput",
        after="kv_connector_block_state",
        insert="""
# Captured requests that ended for their clients: list[CaptureEnd]
capture_ends: list | None = None
# Cached tokens that are computed again because their rows are captured
capture_reforwarded: int = 0
# Steered requests that begin, and slots to load: SteeringStep
steering: Any = None
# Whether a request runs that is given vectors or embeddings
checks_streams: bool = False
""",
        why="Reaches every worker after the steps that computed the rows.",
    ),
]

# SPDX-License-Identifier: Apache-2.0
"""The scheduler's statistics say how often conditions of steering have fired."""

from fork.language import add_field, add_import

EDITS = [
    add_import(
        "from vllm.v1.residual.core.messages import Fired",
        why="The type of the field.",
    ),
    add_field(
        scope="SchedulerStats",
        after="perf_stats",
        insert="steering_fired: Fired = field(default_factory=list)",
        why="Engines report their counts to the front end.",
    ),
]

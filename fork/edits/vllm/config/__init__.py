# SPDX-License-Identifier: Apache-2.0
"""The configuration of steering is imported like the others."""

from fork.language import add_import

EDITS = [
    add_import(
        "from vllm.config.steering import SteeringConfig",
        why="Plug-ins that were written for another fork import it from here.",
    ),
]

# SPDX-License-Identifier: Apache-2.0
"""The engine core tells each front end which hook points the model has."""

from fork.language import add_field

EDITS = [
    add_field(
        scope="EngineCoreReadyResponse",
        after="effective_attention_block_size",
        insert="hook_points: dict[int, list[str]] | None = None",
        why="Admission needs them, and the model is loaded in another process.",
    ),
]

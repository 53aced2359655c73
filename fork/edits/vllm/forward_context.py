# SPDX-License-Identifier: Apache-2.0
"""Piecewise graphs are recorded in families with different launching taps."""

from fork.language import add_field

EDITS = [
    add_field(
        scope="BatchDescriptor",
        after="num_active_loras",
        insert='''
tapped: int = 0
"""The family of graphs: which taps launch in them, 0 for none."""
''',
        why="The key under which a piecewise graph is recorded and found.",
    ),
]

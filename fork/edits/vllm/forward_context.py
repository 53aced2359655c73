# SPDX-License-Identifier: Apache-2.0
"""Piecewise graphs come in families that differ in which taps launch."""

from fork.language import add_field

EDITS = [
    add_field(
        scope="BatchDescriptor",
        after="num_active_loras",
        insert='''
tapped: int = 0
"""Which taps of the residual stream launch in this batch's graphs: 0 for none."""
''',
        why="The key under which a piecewise graph is recorded and found.",
    ),
]

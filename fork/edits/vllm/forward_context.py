# SPDX-License-Identifier: Apache-2.0
"""Piecewise graphs come in two families: with taps that launch, and without."""

from fork.language import add_field

EDITS = [
    add_field(
        scope="BatchDescriptor",
        after="num_active_loras",
        insert='''
tapped: bool = False
"""Whether the taps of the residual stream launch in this batch's graphs."""
''',
        why="The key under which a piecewise graph is recorded and found.",
    ),
]

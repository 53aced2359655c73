# SPDX-License-Identifier: Apache-2.0
"""The server has an option for the page."""

from fork.language import add_field, until

EDITS = [
    *until(
        "0.33.0",
        add_field(
            scope="FrontendArgs",
            after="enable_offline_docs",
            insert='''
enable_lens_page: bool = False
"""Serve a page at `/lens` that shows the running model: tokens tinted by readouts,
lens, attention, steering, patching and features. It uses the HTTP API only."""
''',
            why="The page is mounted where it is set.",
        ),
    ),
]

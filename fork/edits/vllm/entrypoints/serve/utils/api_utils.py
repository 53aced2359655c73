# SPDX-License-Identifier: Apache-2.0
"""The steering key does not appear in the log."""

from fork.language import after, until

EDITS = [
    *until(
        "0.33.0",
        after(
            scope="",
            anchor="_SENSITIVE_ARG_FIELDS = frozenset(...)",
            insert='_SENSITIVE_ARG_FIELDS |= {"steering_api_key"}',
            why="The server logs its arguments.",
        ),
    ),
]

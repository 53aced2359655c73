# SPDX-License-Identifier: Apache-2.0
"""The error that stops a build."""


class BuildFailure(Exception):
    """A build failed; the message says what was expected, found, and how to fix it."""

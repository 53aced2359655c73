# SPDX-License-Identifier: Apache-2.0
"""What stops a build."""


class BuildFailure(Exception):
    """A build cannot go on; the text says what was expected, found, and to be done."""

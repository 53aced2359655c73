# SPDX-License-Identifier: Apache-2.0
"""The error that stops a build, and the faults that one reports."""

from dataclasses import asdict, dataclass


class BuildFailure(Exception):
    """A build failed; the message says what was expected, found, and how to fix it."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What does not fit. All faults of a build are collected and reported together."""

    origin: str
    """The file that does not fit: an edit file, an added file, or the weave's."""
    module: str
    """The upstream module."""
    kind: str
    sentence: str

    def as_dict(self) -> dict[str, str]:
        """The fault as JSON-serialisable data."""
        return asdict(self)

# SPDX-License-Identifier: Apache-2.0
"""The faults that prevent a build, from all of its stages."""

from dataclasses import asdict, dataclass

from fork.language import Problem


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault. All faults of a build are collected and reported together."""

    origin: str
    """The file that does not fit: an edit file, an added file, or the weave's."""
    module: str
    """The upstream module."""
    kind: str
    sentence: str

    def as_dict(self) -> dict[str, str]:
        """The fault as JSON-serialisable data."""
        return asdict(self)


def from_problem(problem: Problem) -> Fault:
    """Convert a problem with an edit to a fault."""
    return Fault(
        origin=problem.edit_file,
        module=problem.module,
        kind=problem.kind,
        sentence=problem.sentence(),
    )

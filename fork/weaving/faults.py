# SPDX-License-Identifier: Apache-2.0
"""One thing that keeps the fork from being built, whoever found it."""

from dataclasses import asdict, dataclass

from fork.language import Problem


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault; all of a build are collected and reported together."""

    origin: str
    """What does not fit: an edit file, an added file, or the decoder-layer weave."""
    module: str
    """The upstream module."""
    kind: str
    sentence: str

    def as_dict(self) -> dict[str, str]:
        """The fault as JSON takes it."""
        return asdict(self)


def from_problem(problem: Problem) -> Fault:
    """A fault of one edit."""
    return Fault(
        origin=problem.edit_file,
        module=problem.module,
        kind=problem.kind,
        sentence=problem.sentence(),
    )

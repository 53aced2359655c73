# SPDX-License-Identifier: Apache-2.0
"""The base class of edits, and the changes into which an edit is resolved."""

import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

import libcst as cst

from fork.language.problems import Finding, WrongCount
from fork.language.tree import Tree

Statements = tuple[cst.BaseStatement, ...]
Rewrite = Callable[[cst.CSTNode], cst.CSTNode]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The change of one node of the upstream tree: inserted or replaced statements."""

    node: cst.CSTNode
    before: Statements = ()
    after: Statements = ()
    first: Statements = ()
    """Inserted at the start of the node's body, after its docstring."""
    last: Statements = ()
    """Inserted at the end of the node's body."""
    rewrite: Rewrite | None = None
    """Maps the (possibly already changed) node to its replacement."""
    replacement: Statements | None = None
    """Statements that replace the node."""


Resolution = tuple[Change, ...] | Finding


def _number(release: str) -> tuple[int, ...]:
    """A release as numbers that can be compared; suffixes are left out."""
    digits = re.match(r"\d+(\.\d+)*", release)
    assert digits is not None, f"not a release: {release!r}"
    return tuple(map(int, digits[0].split(".")))


def caller_line() -> int:
    """The line of the edit file that called the operation, for messages."""
    return sys._getframe(2).f_lineno


@dataclass(frozen=True, kw_only=True)
class Edit(ABC):
    """One edit of an upstream module.

    Raises:
        ValueError: `why` is empty or `count` is below 1.
    """

    why: str
    """The reason, one sentence."""
    scope: str = ""
    """Dotted path of the class or function; empty for the module level."""
    count: int = 1
    """The exact number of places that must match."""
    line: int = field(default=0, compare=False)
    since: str = ""
    """The first release that the edit is for; empty for any."""
    until: str = ""
    """The first release that it is not for; empty for none."""

    def applies_to(self, release: str) -> bool:
        """Whether the edit is for a release, such as `0.32.0`."""
        number = _number(release)
        return not (self.since and number < _number(self.since)) and not (
            self.until and number >= _number(self.until)
        )

    def __post_init__(self) -> None:
        if not self.why.strip():
            raise ValueError("why='': say in one sentence why this edit is needed")
        if self.count < 1:
            raise ValueError(f"count={self.count}: an edit matches at least one place")

    @property
    @abstractmethod
    def subject(self) -> str:
        """What the edit is about, for messages: the anchor, parameter or import."""

    @abstractmethod
    def resolve(self, tree: Tree) -> Resolution:
        """The changes that this edit makes to `tree`, or the reason why it cannot."""

    def miscounted(self, found: int) -> WrongCount | None:
        """The finding for a match count other than `count`."""
        if found == self.count:
            return None
        return WrongCount(scope=self.scope, found=found, expected=self.count)

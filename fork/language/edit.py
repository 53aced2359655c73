# SPDX-License-Identifier: Apache-2.0
"""What every edit has in common, and what it turns into on a concrete module."""

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
    """What happens to one node of the upstream tree; statements around or in it."""

    node: cst.CSTNode
    before: Statements = ()
    after: Statements = ()
    first: Statements = ()
    """Go to the start of the node's body, after its docstring."""
    last: Statements = ()
    """Go to the end of the node's body."""
    rewrite: Rewrite | None = None
    """Maps the (already changed) node to its replacement."""
    replacement: Statements | None = None
    """Statements that stand in the node's place."""


Resolution = tuple[Change, ...] | Finding


def caller_line() -> int:
    """Line of the edit file that called the operation, for messages."""
    return sys._getframe(2).f_lineno


@dataclass(frozen=True, kw_only=True)
class Edit(ABC):
    """One edit of an upstream module.

    Raises:
        ValueError: if `why` is empty or `count` is below 1.
    """

    why: str
    """The reason, one sentence."""
    scope: str = ""
    """Dotted path of the class or function; empty for the module level."""
    count: int = 1
    """How many places must match, no more and no less."""
    line: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        if not self.why.strip():
            raise ValueError("why='': say in one sentence why this edit is needed")
        if self.count < 1:
            raise ValueError(f"count={self.count}: an edit matches at least one place")

    @property
    @abstractmethod
    def subject(self) -> str:
        """What messages call the place: the anchor, the parameter, the import."""

    @abstractmethod
    def resolve(self, tree: Tree) -> Resolution:
        """The changes this edit makes to `tree`, or the reason why it cannot."""

    def miscounted(self, found: int) -> WrongCount | None:
        """The finding for a match count other than `count`."""
        if found == self.count:
            return None
        return WrongCount(scope=self.scope, found=found, expected=self.count)

# SPDX-License-Identifier: Apache-2.0
"""Add an import at the top of a module."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import libcst as cst

from fork.language.code import parse_statements
from fork.language.edit import Change, Edit, Resolution, Statements, caller_line
from fork.language.pattern import equal
from fork.language.problems import AlreadyApplied
from fork.language.tree import Tree

_Import = cst.Import | cst.ImportFrom


@dataclass(frozen=True, kw_only=True)
class AddImport(Edit):
    """A new import at the module level."""

    statement: str
    _insert: Statements = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        insert = parse_statements(self.statement)
        if not all(_is_import(node) for node in insert):
            raise ValueError(f"add_import({self.statement!r}): not an import")
        object.__setattr__(self, "_insert", insert)

    @property
    def subject(self) -> str:
        """The import."""
        return self.statement

    def resolve(self, tree: Tree) -> Resolution:
        """Insert below the last import at the module level."""
        top = [node for node in tree.module.body if _is_import(node)]
        there = list(_imported(top))
        new = _imported(self._insert)
        if all(any(equal(one, other) for other in there) for one in new):
            return AlreadyApplied("")
        if top:
            return (Change(node=top[-1], after=self._insert),)
        return (Change(node=tree.module, first=self._insert),)


def _is_import(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.SimpleStatementLine) and all(
        isinstance(small, _Import) for small in node.body
    )


def _imported(lines: Sequence[cst.CSTNode]) -> Iterator[cst.CSTNode]:
    """One import node per imported name."""
    for line in lines:
        assert isinstance(line, cst.SimpleStatementLine), "an import is one line"
        for small in line.body:
            assert isinstance(small, _Import), "only imports come here"
            if isinstance(small.names, cst.ImportStar):
                yield small
                continue
            for alias in small.names:
                yield small.with_changes(names=(alias,))


def add_import(statement: str, *, why: str) -> AddImport:
    """Add an import below the last one at the module level."""
    return AddImport(statement=statement, why=why, line=caller_line())

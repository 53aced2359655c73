# SPDX-License-Identifier: Apache-2.0
"""Insert statements at the start or the end of a body."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import libcst as cst

from fork.language.anchor import Anchor, parse_anchor
from fork.language.code import parse_statements, set_apart
from fork.language.edit import Change, Edit, Resolution, Statements, caller_line
from fork.language.lookup import absence, find_scopes
from fork.language.nodes import is_docstring, statements_of
from fork.language.pattern import equal
from fork.language.problems import AlreadyApplied, Finding, MissingScope
from fork.language.tree import Tree, places


@dataclass(frozen=True, kw_only=True)
class InBody(Edit):
    """Statements at one end of a definition's or compound statement's body."""

    anchor: str | None
    insert: str
    at_end: bool
    _anchor: Anchor | None = field(init=False, repr=False, compare=False)
    _insert: Statements = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        anchor = None if self.anchor is None else parse_anchor(self.anchor)
        if anchor is not None and not anchor.by_header:
            raise ValueError(
                f"anchor={self.anchor!r}: first and last need a header that ends "
                "in a colon, such as 'for x in y:'"
            )
        object.__setattr__(self, "_anchor", anchor)
        object.__setattr__(self, "_insert", parse_statements(self.insert))

    @property
    def subject(self) -> str:
        """The header, or the scope whose body it is."""
        return self.anchor or self.scope or "<module>"

    def resolve(self, tree: Tree) -> Resolution:
        """Insert into the body of every match."""
        bodies = self._bodies(tree)
        if not isinstance(bodies, tuple):
            return bodies
        if any(self._is_applied(node) for node in bodies):
            return AlreadyApplied(self.scope)
        return tuple(self._change(node) for node in bodies)

    def _bodies(self, tree: Tree) -> tuple[cst.CSTNode, ...] | Finding:
        if self._anchor is not None:
            finding = absence(self, tree, self._search)
            if finding is not None:
                return finding
            scopes = tree.scopes(self.scope)
            return tuple(node for scope in scopes for node in self._search(scope))
        scopes_or_finding = find_scopes(self, tree)
        if isinstance(scopes_or_finding, MissingScope):
            return scopes_or_finding
        return self.miscounted(len(scopes_or_finding)) or scopes_or_finding

    def _search(self, owner: cst.CSTNode) -> Iterator[cst.CSTNode]:
        assert self._anchor is not None, "a body without an anchor is found by scope"
        for place in places(owner):
            if self._anchor.matches(place):
                yield self._anchor.last_node(place)

    def _is_applied(self, node: cst.CSTNode) -> bool:
        size = len(self._insert)
        statements = list(statements_of(node))
        start = first_index(node, statements)
        there = statements[-size:] if self.at_end else statements[start : start + size]
        return len(there) == size and all(map(equal, self._insert, there))

    def _change(self, node: cst.CSTNode) -> Change:
        insert = set_apart(self._insert, 2 if isinstance(node, cst.Module) else 1)
        if self.at_end:
            return Change(node=node, last=insert)
        return Change(node=node, first=insert)


def first_index(node: cst.CSTNode, statements: list[cst.CSTNode]) -> int:
    """Where a body's code starts: after docstring and `__future__` imports."""
    takes_docstring = isinstance(node, (cst.Module, cst.FunctionDef, cst.ClassDef))
    index = int(takes_docstring and bool(statements) and is_docstring(statements[0]))
    while index < len(statements) and _is_future_import(statements[index]):
        index += 1
    return index


def _is_future_import(node: cst.CSTNode) -> bool:
    if not isinstance(node, cst.SimpleStatementLine):
        return False
    small = node.body[0]
    if not isinstance(small, cst.ImportFrom) or not isinstance(small.module, cst.Name):
        return False
    return small.module.value == "__future__"


def first(
    *, scope: str, insert: str, why: str, anchor: str | None = None, count: int = 1
) -> InBody:
    """Insert at the start of the scope's body, or of the anchored statement's."""
    return InBody(
        scope=scope,
        anchor=anchor,
        insert=insert,
        why=why,
        count=count,
        at_end=False,
        line=caller_line(),
    )


def last(
    *, scope: str, insert: str, why: str, anchor: str | None = None, count: int = 1
) -> InBody:
    """Insert at the end of the scope's body, or of the anchored statement's."""
    return InBody(
        scope=scope,
        anchor=anchor,
        insert=insert,
        why=why,
        count=count,
        at_end=True,
        line=caller_line(),
    )

# SPDX-License-Identifier: Apache-2.0
"""An upstream module with the lookups that edits need."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import libcst as cst

from fork.language.nodes import (
    Definition,
    Owner,
    children,
    clauses_of,
    statements_of,
)

# A name in these fields is a label, not an expression that can be replaced.
_LABEL_FIELDS = frozenset({"attr", "keyword", "name"})


@dataclass(frozen=True, slots=True)
class Place:
    """A statement among its siblings, or a clause such as `else:`."""

    siblings: Sequence[cst.CSTNode]
    index: int
    is_clause: bool = False

    @property
    def node(self) -> cst.CSTNode:
        """The statement or clause itself."""
        return self.siblings[self.index]


class Tree:
    """A parsed upstream module. Immutable, so that all edits see the same code."""

    def __init__(self, source: str) -> None:
        self.module = cst.parse_module(source)

    def scopes(self, path: str) -> tuple[Owner, ...]:
        """All definitions with this dotted path; the module itself for ``""``."""
        owners: tuple[Owner, ...] = (self.module,)
        for name in path.split(".") if path else ():
            owners = tuple(
                node
                for owner in owners
                for node in definitions(owner)
                if node.name.value == name
            )
        return owners

    @cached_property
    def all_scopes(self) -> tuple[tuple[str, Owner], ...]:
        """Every scope of the module with its dotted path, outermost first."""
        return tuple(_scopes_below(self.module, ""))

    def named(self, name: str) -> tuple[str, ...]:
        """Dotted paths of the definitions called `name`, without repeats."""
        paths = (path for path, _ in self.all_scopes if path.split(".")[-1] == name)
        return tuple(dict.fromkeys(paths))

    @cached_property
    def _parents(self) -> dict[int, cst.CSTNode]:
        parents: dict[int, cst.CSTNode] = {}
        stack: list[cst.CSTNode] = [self.module]
        while stack:
            node = stack.pop()
            for _, child in children(node):
                parents[id(child)] = node
                stack.append(child)
        return parents

    def ancestors(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """The nodes around `node`, innermost first."""
        parent = self._parents.get(id(node))
        while parent is not None:
            yield parent
            parent = self._parents.get(id(parent))


def _scopes_below(owner: Owner, path: str) -> Iterator[tuple[str, Owner]]:
    yield path, owner
    for node in definitions(owner):
        inner = f"{path}.{node.name.value}" if path else node.name.value
        yield from _scopes_below(node, inner)


def places(owner: cst.CSTNode) -> Iterator[Place]:
    """The statements in `owner` and nested blocks, without entering definitions."""
    yield from _places_in(statements_of(owner))


def _places_in(statements: Sequence[cst.CSTNode]) -> Iterator[Place]:
    for index, node in enumerate(statements):
        yield Place(statements, index)
        if not isinstance(node, Definition):
            yield from _places_inside(node)


def _places_inside(compound: cst.CSTNode) -> Iterator[Place]:
    yield from places(compound)
    for clause in clauses_of(compound):
        yield Place((clause,), 0, is_clause=True)
        yield from _places_inside(clause)


def definitions(owner: cst.CSTNode) -> Iterator[Definition]:
    """Classes and functions defined directly in `owner`, also under `if` or `try`."""
    for place in places(owner):
        if isinstance(place.node, Definition):
            yield place.node


def expressions(owner: cst.CSTNode) -> Iterator[cst.BaseExpression]:
    """Expressions in `owner` and its signature, without inner definitions."""
    for field, child in children(owner):
        if field in _LABEL_FIELDS or isinstance(child, Definition):
            continue
        if isinstance(child, cst.BaseExpression):
            yield child
        yield from expressions(child)

# SPDX-License-Identifier: Apache-2.0
"""Insert statements before or after a statement."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import libcst as cst

from fork.language.anchor import Anchor, parse_anchor
from fork.language.code import parse_statements, set_apart
from fork.language.edit import Change, Edit, Resolution, Statements, caller_line
from fork.language.lookup import absence
from fork.language.pattern import equal
from fork.language.problems import AlreadyApplied
from fork.language.tree import Place, Tree, places


@dataclass(frozen=True, kw_only=True)
class Beside(Edit):
    """Statements next to an anchor."""

    anchor: str
    insert: str
    below: bool
    _anchor: Anchor = field(init=False, repr=False, compare=False)
    _insert: Statements = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        anchor = parse_anchor(self.anchor)
        if anchor.is_clause:
            raise ValueError(
                f"anchor={self.anchor!r}: nothing can stand beside a clause; "
                "anchor on the whole statement, or use first or last"
            )
        object.__setattr__(self, "_anchor", anchor)
        object.__setattr__(self, "_insert", parse_statements(self.insert))

    @property
    def subject(self) -> str:
        """The anchor."""
        return self.anchor

    def resolve(self, tree: Tree) -> Resolution:
        """Insert at every place where the anchor matches."""
        finding = absence(self, tree, self._search)
        if finding is not None:
            return finding
        found = [p for scope in tree.scopes(self.scope) for p in self._search(scope)]
        if any(self._is_applied(place) for place in found):
            return AlreadyApplied(self.scope)
        return tuple(self._change(place, tree) for place in found)

    def _search(self, owner: cst.CSTNode) -> Iterator[Place]:
        return (place for place in places(owner) if self._anchor.matches(place))

    def _is_applied(self, place: Place) -> bool:
        size = len(self._insert)
        if self.below:
            start = place.index + len(self._anchor.statements)
        else:
            start = place.index - size
        there = place.siblings[max(start, 0) : max(start, 0) + size]
        return (
            len(there) == size and start >= 0 and all(map(equal, self._insert, there))
        )

    def _change(self, place: Place, tree: Tree) -> Change:
        at_top = place.siblings is tree.module.body
        insert = set_apart(self._insert, 2 if at_top else 1)
        if self.below:
            return Change(node=self._anchor.last_node(place), after=insert)
        return Change(node=place.node, before=insert)


def after(*, scope: str, anchor: str, insert: str, why: str, count: int = 1) -> Beside:
    """Insert statements after every statement that matches the anchor."""
    return Beside(
        scope=scope,
        anchor=anchor,
        insert=insert,
        why=why,
        count=count,
        below=True,
        line=caller_line(),
    )


def before(*, scope: str, anchor: str, insert: str, why: str, count: int = 1) -> Beside:
    """Insert statements before every statement that matches the anchor."""
    return Beside(
        scope=scope,
        anchor=anchor,
        insert=insert,
        why=why,
        count=count,
        below=False,
        line=caller_line(),
    )

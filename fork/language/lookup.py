# SPDX-License-Identifier: Apache-2.0
"""Looks up the scopes and anchors of an edit, or says why they are missing."""

from collections.abc import Callable, Iterator

import libcst as cst

from fork.language.edit import Edit
from fork.language.nodes import Owner
from fork.language.problems import Finding, MissingAnchor, MissingScope, Moved
from fork.language.tree import Tree

Search = Callable[[cst.CSTNode], Iterator[object]]
"""Yields all matches directly in one scope, without entering inner definitions."""


def find_scopes(edit: Edit, tree: Tree) -> tuple[Owner, ...] | MissingScope:
    """The definitions the edit's scope names."""
    scopes = tree.scopes(edit.scope)
    if scopes:
        return scopes
    return MissingScope(edit.scope, tree.named(edit.scope.split(".")[-1]))


def absence(edit: Edit, tree: Tree, search: Search) -> Finding | None:
    """Why `search` does not match as often as the edit says; None if it does."""
    scopes = find_scopes(edit, tree)
    if isinstance(scopes, MissingScope):
        return scopes
    found = sum(1 for scope in scopes for _ in search(scope))
    if found:
        return edit.miscounted(found)
    elsewhere = (
        path for path, owner in tree.all_scopes if any(True for _ in search(owner))
    )
    moved = tuple(dict.fromkeys(elsewhere))
    return Moved(edit.scope, moved) if moved else MissingAnchor(edit.scope)

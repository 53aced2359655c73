# SPDX-License-Identifier: Apache-2.0
"""Applies resolved changes to a tree; everything else is preserved byte for byte."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import libcst as cst

from fork.language.bodies import first_index
from fork.language.edit import Change, Statements
from fork.language.tree import Tree


def apply_changes(tree: Tree, changes: list[Change]) -> str:
    """The module's source with all changes made, in the order of the list."""
    by_node: dict[int, list[Change]] = defaultdict(list)
    touched: set[int] = set()
    for change in changes:
        by_node[id(change.node)].append(change)
        touched.add(id(change.node))
        touched.update(id(node) for node in tree.ancestors(change.node))
    woven = tree.module.visit(_Applier(by_node, touched))
    assert isinstance(woven, cst.Module), "a module stays a module"
    return woven.code


class _Applier(cst.CSTTransformer):
    """Visits only the paths to changed nodes."""

    def __init__(self, changes: dict[int, list[Change]], touched: set[int]) -> None:
        super().__init__()
        self._changes = changes
        self._touched = touched

    def on_visit(self, node: cst.CSTNode) -> bool:
        return id(node) in self._touched

    def on_leave(  # type: ignore[override]  # one rule for all node types
        self, original_node: cst.CSTNode, updated_node: cst.CSTNode
    ) -> cst.CSTNode | cst.FlattenSentinel[cst.CSTNode]:
        changes = self._changes.get(id(original_node))
        if changes is None:
            return updated_node
        return _changed(updated_node, changes)


def _changed(
    node: cst.CSTNode, changes: list[Change]
) -> cst.CSTNode | cst.FlattenSentinel[cst.CSTNode]:
    for change in changes:
        if change.rewrite is not None:
            node = change.rewrite(node)
    first = _gather(change.first for change in changes)
    last = _gather(change.last for change in changes)
    if first or last:
        node = _fill(node, first, last)
    here: Statements = (node,)  # type: ignore[assignment]  # only statements get neighbours
    for change in changes:
        if change.replacement is not None:
            here = _keep_lines_above(node, change.replacement)
    before = _gather(change.before for change in changes)
    after = _gather(change.after for change in changes)
    if before:
        before, here = _share_lines_above(before, here)
    result = (*before, *here, *after)
    return result[0] if len(result) == 1 else cst.FlattenSentinel(result)


def _gather(groups: Iterable[Statements]) -> Statements:
    return tuple(node for group in groups for node in group)


def _fill(node: cst.CSTNode, first: Statements, last: Statements) -> cst.CSTNode:
    """Add statements at the ends of a body; a one-line body becomes a block."""
    if isinstance(node, cst.Module):
        return node.with_changes(body=_filled(node, node.body, first, last))
    suite = getattr(node, "body", None)
    if isinstance(suite, cst.SimpleStatementSuite):
        line = cst.SimpleStatementLine(body=suite.body)
        suite = cst.IndentedBlock(body=(line,))
    assert isinstance(suite, cst.IndentedBlock), f"{type(node).__name__} has no body"
    filled = _filled(node, suite.body, first, last)
    return node.with_changes(body=suite.with_changes(body=filled))


def _filled(
    node: cst.CSTNode,
    body: Sequence[cst.BaseStatement],
    first: Statements,
    last: Statements,
) -> Statements:
    start = first_index(node, list(body))
    return (*body[:start], *first, *body[start:], *last)


def _keep_lines_above(node: cst.CSTNode, new: Statements) -> Statements:
    above = getattr(node, "leading_lines", ())
    head = new[0].with_changes(leading_lines=(*above, *_lines_above(new[0])))
    return (head, *new[1:])


def _share_lines_above(
    before: Statements, here: Statements
) -> tuple[Statements, Statements]:
    """Move blank lines above the inserted code; comments stay with their statement."""
    lines = list(_lines_above(here[0]))
    blank = 0
    while blank < len(lines) and lines[blank].comment is None:
        blank += 1
    own = _lines_above(before[0])
    head = before[0].with_changes(leading_lines=(*lines[:blank], *own))
    rest = here[0].with_changes(leading_lines=tuple(lines[blank:]))
    return (head, *before[1:]), (rest, *here[1:])


def _lines_above(node: cst.CSTNode) -> tuple[cst.EmptyLine, ...]:
    return tuple(getattr(node, "leading_lines", ()))

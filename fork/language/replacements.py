# SPDX-License-Identifier: Apache-2.0
"""Replace an expression or a statement."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import libcst as cst

from fork.language.anchor import Anchor, parse_anchor
from fork.language.code import parse_statements
from fork.language.edit import Change, Edit, Resolution, caller_line
from fork.language.lookup import absence, find_scopes
from fork.language.pattern import matches
from fork.language.problems import AlreadyApplied, MissingAnchor, Moved
from fork.language.tree import Place, Tree, expressions, places

MATCHED = "$0"
_LOOSE = (
    cst.BinaryOperation, cst.BooleanOperation, cst.Comparison, cst.UnaryOperation,
    cst.IfExp, cst.Lambda, cst.NamedExpr, cst.Await, cst.Yield, cst.Tuple,
    cst.GeneratorExp,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Replace(Edit):
    """Replaces the matched expression or statement."""

    anchor: str
    by: str
    _pattern: cst.BaseExpression | Anchor = field(init=False, repr=False, compare=False)
    _result: cst.BaseExpression | Anchor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        pattern = _parse(self.anchor)
        if isinstance(pattern, Anchor) and (
            pattern.by_header or len(pattern.statements) > 1
        ):
            raise ValueError(
                f"anchor={self.anchor!r}: replace takes an expression or one whole "
                "statement"
            )
        blank = "__" if isinstance(pattern, cst.BaseExpression) else "pass"
        result = _parse(self.by.replace(MATCHED, blank))
        if isinstance(pattern, Anchor) and not isinstance(result, Anchor):
            result = parse_anchor(self.by.replace(MATCHED, blank))
        if isinstance(result, Anchor) and not isinstance(pattern, Anchor):
            raise ValueError(f"by={self.by!r}: an expression takes an expression")
        object.__setattr__(self, "_pattern", pattern)
        object.__setattr__(self, "_result", result)

    @property
    def subject(self) -> str:
        """The anchor."""
        return self.anchor

    def resolve(self, tree: Tree) -> Resolution:
        """Replace every match in the scope."""
        if self._is_applied(tree):
            return AlreadyApplied(self.scope)
        finding = absence(self, tree, self._search)
        if finding is not None:
            return finding
        found = [n for scope in tree.scopes(self.scope) for n in self._search(scope)]
        return tuple(self._change(node, tree) for node in found)

    def _is_applied(self, tree: Tree) -> bool:
        """Whether the replacement has been applied already.

        Upstream may contain the result anyway. So unless the result repeats the anchor,
        it counts as applied only if the anchor is gone.
        """
        scopes = find_scopes(self, tree)
        if not isinstance(scopes, tuple):
            return False
        there = any(True for s in scopes for _ in _search(self._result, s))
        if not there:
            return False
        anchor_is_gone = isinstance(
            absence(self, tree, self._search), (MissingAnchor, Moved)
        )
        return MATCHED in self.by or anchor_is_gone

    def _search(self, owner: cst.CSTNode) -> Iterator[cst.CSTNode]:
        return _search(self._pattern, owner)

    def _change(self, node: cst.CSTNode, tree: Tree) -> Change:
        if isinstance(self._pattern, cst.BaseExpression):
            text = self.by.replace(MATCHED, tree.module.code_for_node(node))
            new = _expression(text)
            return Change(node=node, rewrite=lambda _: new)
        bare = node.with_changes(leading_lines=())
        text = self.by.replace(MATCHED, tree.module.code_for_node(bare).rstrip())
        return Change(node=node, replacement=parse_statements(text))


def _search(
    pattern: cst.BaseExpression | Anchor, owner: cst.CSTNode
) -> Iterator[cst.CSTNode]:
    if isinstance(pattern, cst.BaseExpression):
        return (node for node in expressions(owner) if matches(pattern, node))
    found: Iterator[Place] = (p for p in places(owner) if pattern.matches(p))
    return (place.node for place in found)


def _parse(text: str) -> cst.BaseExpression | Anchor:
    try:
        return cst.parse_expression(text.strip())
    except cst.ParserSyntaxError:
        return parse_anchor(text)


def _expression(text: str) -> cst.BaseExpression:
    """Parse an expression of one or more lines; keep parentheses that may be needed."""
    node = cst.parse_expression(f"({text})")
    if isinstance(node, _LOOSE):
        return node
    return node.with_changes(lpar=node.lpar[1:], rpar=node.rpar[:-1])


def replace(*, scope: str, anchor: str, by: str, why: str, count: int = 1) -> Replace:
    """Replace an expression or a statement; `$0` in `by` is the matched source."""
    return Replace(
        scope=scope, anchor=anchor, by=by, why=why, count=count, line=caller_line()
    )

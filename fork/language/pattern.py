# SPDX-License-Identifier: Apache-2.0
"""Compares code by structure, ignoring layout, with wildcards.

In a pattern the name `__` matches any one expression. `...` does too, and in a list of
arguments, elements or parameters it matches any number of them.
"""

from collections.abc import Sequence
from typing import Any

import libcst as cst

from fork.language.nodes import BODY_FIELDS, meaning_fields, statements_of

_TEXT = (cst.SimpleString, cst.ConcatenatedString)


def equal(one: cst.CSTNode, other: cst.CSTNode) -> bool:
    """Whether two nodes are the same code, ignoring layout."""
    return _Comparison(wildcards=False).nodes(one, other)


def matches(pattern: cst.CSTNode, node: cst.CSTNode) -> bool:
    """Whether `node` has the structure of `pattern`, wildcards allowed."""
    return _Comparison(wildcards=True).nodes(pattern, node)


def header_matches(pattern: cst.CSTNode, node: cst.CSTNode) -> bool:
    """Whether two compound statements or clauses agree up to the colon.

    Decorators are ignored, and so is a return annotation if the pattern has none.
    """
    if type(pattern) is not type(node):
        return False
    skipped = BODY_FIELDS | {"decorators"}
    if getattr(pattern, "returns", None) is None:
        skipped |= {"returns"}
    if isinstance(pattern, cst.ClassDef) and any(map(_is_any_number, pattern.bases)):
        skipped |= {"keywords"}
    return _Comparison(wildcards=True).fields(pattern, node, skipped)


class _Comparison:
    """Compares patterns with nodes, with or without wildcards."""

    def __init__(self, wildcards: bool) -> None:
        self._wildcards = wildcards

    def nodes(self, pattern: cst.CSTNode, node: cst.CSTNode) -> bool:
        if self._wildcards and _is_wildcard(pattern):
            return isinstance(node, cst.BaseExpression)
        if isinstance(pattern, _TEXT) and isinstance(node, _TEXT):
            return _same_text(pattern, node)
        if isinstance(pattern, cst.BaseSuite) and isinstance(node, cst.BaseSuite):
            return self._suites(pattern, node)
        if type(pattern) is not type(node):
            return False
        if self._wildcards and _takes_any_parameters(pattern):
            return True
        return self.fields(pattern, node, frozenset())

    def fields(
        self, pattern: cst.CSTNode, node: cst.CSTNode, skipped: frozenset[str]
    ) -> bool:
        return all(
            self._values(getattr(pattern, name), getattr(node, name))
            for name in meaning_fields(type(pattern))
            if name not in skipped
        )

    def _values(self, pattern: Any, value: Any) -> bool:  # a field of any node type
        if isinstance(pattern, cst.CSTNode):
            return isinstance(value, cst.CSTNode) and self.nodes(pattern, value)
        if isinstance(pattern, (list, tuple)):
            return isinstance(value, (list, tuple)) and self._items(pattern, value)
        return bool(pattern == value)

    def _suites(self, pattern: cst.BaseSuite, node: cst.BaseSuite) -> bool:
        return self._items(_lines(pattern), _lines(node))

    def _items(
        self, patterns: Sequence[cst.CSTNode], items: Sequence[cst.CSTNode]
    ) -> bool:
        if not patterns:
            return not items
        head, tail = patterns[0], patterns[1:]
        if self._wildcards and _is_any_number(head):
            return any(self._items(tail, items[i:]) for i in range(len(items) + 1))
        return (
            bool(items) and self.nodes(head, items[0]) and self._items(tail, items[1:])
        )


def _lines(suite: cst.BaseSuite) -> Sequence[cst.CSTNode]:
    return statements_of(cst.Else(body=suite))


def _is_wildcard(pattern: cst.CSTNode) -> bool:
    is_blank = isinstance(pattern, cst.Name) and pattern.value == "__"
    return is_blank or isinstance(pattern, cst.Ellipsis)


def _is_any_number(pattern: cst.CSTNode) -> bool:
    if isinstance(pattern, cst.Arg):
        plain = pattern.keyword is None and not pattern.star
        return plain and isinstance(pattern.value, cst.Ellipsis)
    return isinstance(pattern, cst.Element) and isinstance(pattern.value, cst.Ellipsis)


def _takes_any_parameters(pattern: cst.CSTNode) -> bool:
    if not isinstance(pattern, cst.Parameters) or len(pattern.params) != 1:
        return False
    return pattern.params[0].name.value == "__"


def _same_text(
    one: cst.SimpleString | cst.ConcatenatedString,
    other: cst.SimpleString | cst.ConcatenatedString,
) -> bool:
    if one.evaluated_value is not None and other.evaluated_value is not None:
        return bool(one.evaluated_value == other.evaluated_value)
    # A concatenation with an f-string has no value; compare it part by part.
    return type(one) is type(other) and _Comparison(wildcards=False).fields(
        one, other, frozenset()
    )

# SPDX-License-Identifier: Apache-2.0
"""Anchors: code that is compared by structure, ignoring layout, with wildcards.

In a pattern the name `__` matches any one expression. `...` does too, and in a list of
arguments, elements or parameters it matches any number of them.
"""

import ast
import re
from dataclasses import dataclass
from textwrap import dedent
from typing import Any

from fork.language.source import Place

_HEADER_ONLY = frozenset(
    {"body", "orelse", "handlers", "finalbody", "cases", "decorator_list"}
)
_NO_MEANING = frozenset({"ctx", "kind", "type_comment", "type_ignores"})
_ANY_NUMBER_IN = frozenset({"args", "elts", "bases"})


@dataclass(frozen=True, slots=True)
class Anchor:
    """A statement, several in a row, or the header of a compound statement."""

    statements: tuple[ast.stmt, ...]
    by_header: bool
    """Whether the last statement is matched only up to its colon."""

    def last_of(self, place: Place) -> ast.stmt | None:
        """What the anchor's last statement matches if they begin at `place`."""
        block, index = place
        there = block[index : index + len(self.statements)]
        if len(there) < len(self.statements) or not all(
            map(self._matches, self.statements, there)
        ):
            return None
        return there[-1]

    def _matches(self, pattern: ast.stmt, node: ast.stmt) -> bool:
        if not self.by_header or pattern is not self.statements[-1]:
            return matches(pattern, node)
        skipped = set(_HEADER_ONLY)
        if getattr(pattern, "returns", None) is None:
            skipped.add("returns")
        if any(_is_ellipsis(base) for base in getattr(pattern, "bases", ())):
            skipped.add("keywords")
        return type(pattern) is type(node) and _fields_match(pattern, node, skipped)


def parse_anchor(text: str) -> Anchor:
    """Parse an anchor; one that ends in a colon is a header.

    Raises:
        ValueError: the text is not valid code.
    """
    code = dedent(text).strip()
    by_header = code.endswith(":")
    if by_header:
        # `...` is no parameter name, so `def f(...):` is written with `__`.
        code = re.sub(r"(\bdef \w+)\(\.\.\.\)", r"\1(__)", code) + " pass"
    try:
        statements = tuple(ast.parse(code).body)
    except SyntaxError as error:
        raise ValueError(f"anchor={text!r}: not a statement ({error.msg})") from None
    if not statements:
        raise ValueError("anchor='': name the statement the edit belongs to")
    return Anchor(statements, by_header)


def parse_expression(text: str) -> ast.expr:
    """Parse an expression of one or more lines.

    Raises:
        ValueError: the text is not an expression.
    """
    try:
        return ast.parse(f"({text})", mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"{text!r}: not an expression ({error.msg})") from None


def matches(pattern: ast.AST, node: ast.AST) -> bool:
    """Whether `node` has the structure of `pattern`."""
    if _is_ellipsis(pattern) or (isinstance(pattern, ast.Name) and pattern.id == "__"):
        return isinstance(node, ast.expr)
    if type(pattern) is not type(node):
        return False
    if isinstance(pattern, ast.arguments) and [p.arg for p in pattern.args] == ["__"]:
        return True
    if isinstance(pattern, ast.Call) and any(map(_is_ellipsis, pattern.args)):
        assert isinstance(node, ast.Call), "the types are equal"
        behind = node.keywords[len(node.keywords) - len(pattern.keywords) :]
        return _match(pattern.keywords, behind) and _fields_match(
            pattern, node, {"keywords"}
        )
    return _fields_match(pattern, node, set())


def _fields_match(pattern: ast.AST, node: ast.AST, skipped: set[str]) -> bool:
    return all(
        _match(getattr(pattern, name), getattr(node, name), name in _ANY_NUMBER_IN)
        for name in pattern._fields
        if name not in skipped | _NO_MEANING
    )


def _match(pattern: Any, value: Any, any_number: bool = False) -> bool:
    """Whether the values of a field match, which are nodes, lists or constants."""
    if isinstance(pattern, ast.AST):
        return isinstance(value, ast.AST) and matches(pattern, value)
    if not isinstance(pattern, list):
        return type(pattern) is type(value) and bool(pattern == value)
    if not pattern:
        return not value
    head, tail = pattern[0], pattern[1:]
    if any_number and _is_ellipsis(head):
        return any(_match(tail, value[i:], True) for i in range(len(value) + 1))
    return (
        bool(value) and _match(head, value[0]) and _match(tail, value[1:], any_number)
    )


def _is_ellipsis(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...

# SPDX-License-Identifier: Apache-2.0
"""The fields of a LibCST node that are code, and the statements in it."""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import cache

import libcst as cst

Definition = cst.FunctionDef | cst.ClassDef
Owner = cst.Module | cst.FunctionDef | cst.ClassDef

BODY_FIELDS = frozenset({"body", "orelse", "handlers", "finalbody", "cases"})
_LAYOUT_FIELDS = frozenset(
    {
        *("leading_lines", "lines_after_decorators", "trailing_whitespace"),
        *("comma", "semicolon", "header", "footer", "indent"),
        *("lpar", "rpar", "lbracket", "rbracket", "lbrace", "rbrace"),
        *("start", "end"),  # the quotes of an f-string
        *("encoding", "default_indent", "default_newline", "has_trailing_newline"),
    }
)


@cache
def meaning_fields(kind: type[cst.CSTNode]) -> tuple[str, ...]:
    """Fields of a node class that are code rather than layout."""
    return tuple(
        field.name
        for field in fields(kind)
        if field.name not in _LAYOUT_FIELDS
        and not field.name.startswith(("whitespace", "_"))
    )


def children(node: cst.CSTNode) -> Iterator[tuple[str, cst.CSTNode]]:
    """Each child that is code rather than layout, with the name of its field."""
    for name in meaning_fields(type(node)):
        value = getattr(node, name)
        if isinstance(value, cst.CSTNode):
            yield name, value
        elif isinstance(value, (list, tuple)):
            for item in value:
                if isinstance(item, cst.CSTNode):
                    yield name, item


def statements_of(node: cst.CSTNode) -> Sequence[cst.CSTNode]:
    """The statements of a module's, definition's or compound statement's body."""
    if isinstance(node, cst.Module):
        return node.body
    body = getattr(node, "body", None)
    if isinstance(body, cst.IndentedBlock):
        return body.body
    if isinstance(body, cst.SimpleStatementSuite):
        return (cst.SimpleStatementLine(body=body.body),)
    return ()


def clauses_of(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """The `elif`, `else`, `except`, `finally` and `case` parts of a statement."""
    for name in ("handlers", "cases", "orelse", "finalbody"):
        value = getattr(node, name, None)
        if isinstance(value, cst.CSTNode):
            yield value
        elif value is not None:
            yield from value


def is_docstring(node: cst.CSTNode) -> bool:
    """Whether a statement is a lone string."""
    if not isinstance(node, cst.SimpleStatementLine) or not node.body:
        return False
    small = node.body[0]
    return isinstance(small, cst.Expr) and isinstance(
        small.value, (cst.SimpleString, cst.ConcatenatedString)
    )

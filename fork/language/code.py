# SPDX-License-Identifier: Apache-2.0
"""Parses the code that edits insert."""

from textwrap import dedent

import libcst as cst

_BLANK = cst.EmptyLine(indent=False)


def parse_statements(text: str) -> tuple[cst.BaseStatement, ...]:
    """Statements of inserted code, including comments above the first one.

    Raises:
        ValueError: the text is not valid code or has no statement.
    """
    code = dedent(text.removeprefix("\n")).rstrip() + "\n"
    try:
        module = cst.parse_module(code)
    except cst.ParserSyntaxError as error:
        raise ValueError(f"insert={text!r}: not code ({error.message})") from None
    if not module.body:
        raise ValueError(f"insert={text!r}: holds no statement")
    head, *rest = module.body
    # LibCST gives the comments at the top of a module to the module.
    lines = (*module.header, *head.leading_lines)
    return (head.with_changes(leading_lines=lines), *rest)


def set_apart(
    statements: tuple[cst.BaseStatement, ...], blank_lines: int
) -> tuple[cst.BaseStatement, ...]:
    """Put blank lines above each definition that does not have its own."""
    return tuple(
        node.with_changes(leading_lines=(*[_BLANK] * blank_lines, *node.leading_lines))
        if isinstance(node, (cst.FunctionDef, cst.ClassDef))
        and not (node.leading_lines and node.leading_lines[0].comment is None)
        else node
        for node in statements
    )

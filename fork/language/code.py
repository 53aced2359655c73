# SPDX-License-Identifier: Apache-2.0
"""Statements that edits insert."""

import ast
import io
import tokenize
from textwrap import dedent

from fork.language.source import Definition, top_line


class Code:
    """Inserted statements, with the comments above them.

    Raises:
        ValueError: the text is not valid code or has no statement.
    """

    def __init__(self, text: str) -> None:
        code = dedent(text.removeprefix("\n")).rstrip() + "\n"
        try:
            self.statements = ast.parse(code).body
        except SyntaxError as error:
            raise ValueError(f"insert={text!r}: not code ({error.msg})") from None
        if not self.statements:
            raise ValueError(f"insert={text!r}: holds no statement")
        self._lines = code.splitlines()
        self._in_strings = {
            line
            for token in tokenize.generate_tokens(io.StringIO(code).readline)
            if token.type == tokenize.STRING
            for line in range(token.start[0] + 1, token.end[0] + 1)
        }

    def lines(self, indent: bytes, newline: bytes) -> bytes:
        """The lines of the statements; definitions are set apart by blank lines."""
        blank = newline * (1 if indent else 2)
        apart = set(map(self._top_of, self.statements))
        lines = []
        for number, line in enumerate(self._lines, 1):
            above = blank if number in apart else b""
            margin = indent if line and number not in self._in_strings else b""
            lines.append(above + margin + line.encode() + newline)
        return b"".join(lines)

    def _top_of(self, node: ast.stmt) -> int:
        """The line above which a definition needs blank lines; otherwise 0."""
        if not isinstance(node, Definition):
            return 0
        top = top_line(node)
        while top > 1 and self._lines[top - 2].startswith("#"):
            top -= 1
        return 0 if top > 1 and not self._lines[top - 2] else top

# SPDX-License-Identifier: Apache-2.0
"""Edits that insert statements, fields and imports, and those of a class's header."""

import ast
import io
import tokenize
from collections.abc import Iterator
from textwrap import dedent

from fork.language.edit import Edit, Misfit, Splice, edit
from fork.language.pattern import parse_anchor
from fork.language.source import (
    Definition,
    Owner,
    Source,
    places,
    top_line,
)


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


def after(*, scope: str, anchor: str, insert: str, why: str, count: int = 1) -> Edit:
    """Insert statements after every statement that matches the anchor."""
    pattern, code = parse_anchor(anchor), Code(insert)

    def search(source: Source, owner: Owner) -> Iterator[Splice]:
        for place in places(owner):
            if (node := pattern.last_of(place)) is not None:
                yield _below(source, node, code)

    return edit(anchor, search, why=why, scope=scope, count=count)


def before(*, scope: str, anchor: str, insert: str, why: str, count: int = 1) -> Edit:
    """Insert statements before every statement that matches the anchor."""
    pattern, code = parse_anchor(anchor), Code(insert)

    def search(source: Source, owner: Owner) -> Iterator[Splice]:
        for block, index in places(owner):
            if pattern.last_of((block, index)) is not None:
                yield _above(source, block[index], code)

    return edit(anchor, search, why=why, scope=scope, count=count)


def first(*, scope: str, insert: str, why: str) -> Edit:
    """Insert at the start of the scope's body."""
    code = Code(insert)

    def search(source: Source, owner: Owner) -> Iterator[Splice]:
        yield _on_top(source, owner.body, code)

    return edit(scope, search, why=why, scope=scope)


def last(*, scope: str, insert: str, why: str) -> Edit:
    """Insert at the end of the scope's body."""
    code = Code(insert)

    def search(source: Source, owner: Owner) -> Iterator[Splice]:
        yield _below(source, owner.body[-1], code)

    return edit(scope, search, why=why, scope=scope)


def add_field(*, scope: str, after: str, insert: str, why: str) -> Edit:
    """Add fields to a class below the field `after` and its docstring."""
    code = Code(insert)
    if not any(map(_field, code.statements)):
        raise ValueError(f"insert={insert!r}: declares no field")

    def search(source: Source, owner: Owner) -> Iterator[Splice]:
        names = list(map(_field, owner.body))
        if after not in names:
            raise Misfit("Unfit", f'finds no field "{after}" in "{scope}"')
        index = names.index(after)
        documented = _is_docstring(*owner.body[index + 1 : index + 2])
        yield _below(source, owner.body[index + documented], code)

    return edit(after, search, why=why, scope=scope)


def add_import(statement: str, *, why: str) -> Edit:
    """Add imports below the last one at the module level."""
    code = Code(statement)
    if not all(
        isinstance(node, ast.Import | ast.ImportFrom) for node in code.statements
    ):
        raise ValueError(f"add_import({statement!r}): not an import")

    def search(source: Source, owner: Owner) -> Iterator[Splice]:
        top = [n for n in owner.body if isinstance(n, ast.Import | ast.ImportFrom)]
        if top:
            yield _below(source, top[-1], code)
        else:
            yield _on_top(source, owner.body, code)

    return edit(statement, search, why=why)


def add_decorator(*, scope: str, decorator: str, why: str) -> Edit:
    """Put a decorator above all others of a class or function."""
    line = f"@{decorator.removeprefix('@')}".encode()

    def search(source: Source, owner: Owner) -> Iterator[Splice]:
        assert isinstance(owner, Definition), "a module takes no decorator"
        at = source.line_start(top_line(owner))
        yield Splice(at, at, source.indent(owner) + line + source.newline)

    return edit(decorator, search, why=why, scope=scope)


def add_base(*, scope: str, base: str, why: str) -> Edit:
    """Let a class without base classes inherit from one."""

    def search(source: Source, owner: Owner) -> Iterator[Splice]:
        assert isinstance(owner, ast.ClassDef), f"{scope} is no class"
        if owner.bases or owner.keywords:
            raise Misfit("Unfit", f'finds base classes of "{scope}"')
        at = source.data.index(b":", source.start(owner))
        yield Splice(at, at, f"({base})".encode())

    return edit(base, search, why=why, scope=scope)


def _indent(source: Source, node: ast.stmt) -> bytes:
    indent = source.indent(node)
    if indent.strip():
        raise Misfit("Unfit", f"needs a line that {source.module} shares with others")
    return indent


def _below(source: Source, node: ast.stmt, code: Code) -> Splice:
    assert node.end_lineno is not None, "parsed code has places"
    indent, at = _indent(source, node), source.line_start(node.end_lineno + 1)
    return Splice(at, at, code.lines(indent, source.newline), -len(indent))


def _above(source: Source, node: ast.stmt, code: Code) -> Splice:
    """Blank lines stay above what is inserted, comments with their statement."""
    top = top_line(node)
    indent = _indent(source, node)
    while top > 1 and source.line(top - 1).startswith(indent + b"#"):
        top -= 1
    at = source.line_start(top)
    return Splice(at, at, code.lines(indent, source.newline))


def _on_top(source: Source, body: list[ast.stmt], code: Code) -> Splice:
    """Insert below a docstring and imports from `__future__`."""
    index = int(_is_docstring(body[0]))
    while index < len(body) and _is_future_import(body[index]):
        index += 1
    if index:
        return _below(source, body[index - 1], code)
    top, indent = top_line(body[0]), _indent(source, body[0])
    while indent and source.line(top - 1).strip()[:1] in (b"", b"#"):
        top -= 1
    at = source.line_start(top)
    return Splice(at, at, code.lines(indent, source.newline), -len(indent))


def _is_docstring(node: ast.stmt | None = None) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _is_future_import(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def _field(node: ast.stmt) -> str | None:
    match node:
        case ast.AnnAssign(target=ast.Name(id=name)):
            return name
        case ast.Assign(targets=[ast.Name(id=name), *_]):
            return name
    return None

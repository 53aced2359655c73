# SPDX-License-Identifier: Apache-2.0
"""Edits within a statement: expressions, parameters and arguments.

Without them an edit would replace the whole statement, and copy upstream's code.
"""

import ast
import re
from collections.abc import Iterator, Sequence

from fork.language.edit import Edit, Splice, edit
from fork.language.pattern import matches, parse_expression
from fork.language.source import Owner, Source, expressions

_LOOSE = (
    ast.BinOp, ast.BoolOp, ast.Compare, ast.UnaryOp, ast.IfExp, ast.Lambda,
    ast.NamedExpr, ast.Await, ast.Yield, ast.Tuple, ast.GeneratorExp,
)  # fmt: skip


def replace(*, scope: str, anchor: str, by: str, why: str, count: int = 1) -> Edit:
    """Replace an expression."""
    pattern, new = parse_expression(anchor), by.encode()
    if isinstance(parse_expression(by), _LOOSE):
        new = b"(" + new + b")"

    def search(source: Source, owner: Owner) -> Iterator[Splice]:
        for node in expressions(owner):
            if matches(pattern, node):
                margin = re.match(rb"[ \t]*", source.line(node.lineno))
                assert margin is not None, "an expression that matches anything"
                lines = new.replace(b"\n", b"\n" + margin[0])
                yield Splice(source.start(node), source.end(node), lines)

    return edit(anchor, search, why=why, scope=scope, count=count)


def add_argument(
    *, scope: str, call: str, argument: str, why: str, count: int = 1
) -> Edit:
    """Add `name=value` to the calls of `call`, last but before any `**kwargs`."""
    callee, probe = parse_expression(call), parse_expression(f"f({argument})")
    if not isinstance(probe, ast.Call) or not probe.keywords:
        raise ValueError(f"argument={argument!r}: give one, as name=value")

    def search(source: Source, owner: Owner) -> Iterator[Splice]:
        for node in expressions(owner):
            if isinstance(node, ast.Call) and matches(callee, node.func):
                named = [word for word in node.keywords if word.arg]
                items: list[ast.expr | ast.keyword] = [*node.args, *named]
                yield _item(source, source.end(node.func), items, argument)

    return edit(f"{call}({argument})", search, why=why, scope=scope, count=count)


def add_parameter(*, scope: str, parameter: str, why: str) -> Edit:
    """Add a parameter to a function, last but before any `**kwargs`."""
    parse_expression(f"lambda {parameter.partition(':')[0]}: 0")

    def search(source: Source, owner: Owner) -> Iterator[Splice]:
        assert isinstance(owner, ast.FunctionDef), f"{scope} is no function"
        of = owner.args
        named = [*of.posonlyargs, *of.args, of.vararg, *of.kwonlyargs]
        values = [*of.defaults, *of.kw_defaults]
        items: list[ast.expr | ast.arg] = [*filter(None, named), *filter(None, values)]
        yield _item(source, source.start(owner), items, parameter)

    return edit(parameter, search, why=why, scope=scope)


def _item(
    source: Source,
    head: int,
    items: Sequence[ast.expr | ast.arg | ast.keyword],
    new: str,
) -> Splice:
    """The splice that adds to a list in parentheses, laid out like what is there.

    Args:
        source: the module.
        head: an offset before the opening parenthesis.
        items: what the new item follows, and what belongs to it; in any order.
        new: the item without a comma.
    """
    opening = re.compile(rb"\((\s*)").search(source.data, head)
    assert opening is not None, "a call and a function have parentheses"
    ends = sorted(map(source.end, items))
    if not ends:
        return Splice(opening.end(), opening.end(), new.encode())
    comma = re.compile(rb"\s*,([ \t]*#[^\n]*)?").match(source.data, ends[-1])
    space = opening[1] or b" "
    if comma is None:
        return Splice(ends[-1], ends[-1], b"," + space + new.encode())
    return Splice(comma.end(), comma.end(), space + new.encode() + b",")

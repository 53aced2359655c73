# SPDX-License-Identifier: Apache-2.0
"""Finds the decoder-layer classes of a module by how the module uses them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

_CHEAP = re.compile(r"class \w*Decoder\w*Layer\b|class \w*HybridLayer\b|make_layers\(")
_NAME = re.compile(r"Decoder\w*Layer$|HybridLayer$")
_PLAIN_BASE = re.compile(r"(torch\.)?nn\.|Protocol")


def may_hold_layers(source: str) -> bool:
    """A cheap text search that decides whether to parse the source at all."""
    return _CHEAP.search(source) is not None


def decoder_layers(source: str) -> list[str]:
    """Names of classes that are built as layers of a stack or are named like one.

    In order of definition. A stack is built by `make_layers(count, factory)`. The
    factory is a lambda, a local function or a class, given directly or through a
    variable or an attribute.
    """
    tree = ast.parse(source)
    meanings = _meanings(tree)
    words = _closure(_factory_words(tree), meanings)
    return [
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        if node.name in words or _NAME.search(node.name)
        if _is_a_module(node)
    ]


def _is_a_module(node: ast.ClassDef) -> bool:
    defines = any(
        isinstance(m, ast.FunctionDef) and m.name == "forward" for m in node.body
    )
    inherits = any(not _PLAIN_BASE.match(ast.unparse(b)) for b in node.bases)
    return defines or inherits


def _is_make_layers(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).endswith("make_layers")


def _factory_words(tree: ast.Module) -> set[str]:
    """The names that occur in layer factories."""
    calls = filter(_is_make_layers, ast.walk(tree))
    return {word for call in calls for word in _words(call)}


def _meanings(tree: ast.Module) -> dict[str, set[str]]:
    """The names to which each variable, parameter, attribute or inner function refers.

    Classes are not expanded: the parts of a layer are not layers.
    """
    found: dict[str, set[str]] = {}
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        if any(map(_is_make_layers, ast.walk(function))):
            for name, value in _definitions(function):
                found.setdefault(name, set()).update(_words(value))
    for node in tree.body:
        for part in node.body if isinstance(node, ast.ClassDef) else ():
            for name, value in _assigned(part):
                found.setdefault(name, set()).update(_words(value))
    return found


def _definitions(function: ast.FunctionDef) -> Iterator[tuple[str, ast.AST]]:
    for node in ast.walk(function):
        yield from _assigned(node)
        if isinstance(node, ast.FunctionDef) and node is not function:
            yield node.name, node


def _assigned(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            if isinstance(target, ast.Name | ast.Attribute):
                yield ast.unparse(target).removeprefix("self."), node.value


def _words(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            yield part.id
        elif isinstance(part, ast.Attribute):
            yield part.attr


def _closure(words: set[str], meanings: dict[str, set[str]]) -> set[str]:
    known: set[str] = set()
    pending = list(words)
    while pending:
        word = pending.pop()
        if word not in known:
            known.add(word)
            pending.extend(meanings.get(word, ()))
    return known

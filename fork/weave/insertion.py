# SPDX-License-Identifier: Apache-2.0
"""Inserts hook points into a parsed module: calls, a decorator and an import."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from textwrap import indent
from typing import Any

import libcst as cst
import libcst.matchers as m

from .layer_class import code
from .placement import Site
from .rules import Rule

_PROPERTY = """@property
def hook_points_unless(self) -> tuple[str, ...]:
    reasons = (
{pairs}    )
    return tuple(reason for met, reason in reasons if met)
"""
_LACKING = """@property
def hook_points_lacking(self) -> dict[str, str]:
    reasons = (
{pairs}    )
    return {{point: why for met, points, why in reasons if met for point in points}}
"""
_RUNS = """@property
def hook_points_runs(self) -> dict[int, str]:
    return {{int(run): attention.layer_name for run, attention in {runs}}}
"""
_STREAMS = """@property
def hook_points_streams(self) -> int:
    return {streams}
"""
_IMPORT = "from vllm.model_executor.layers.residual import tap as residual_tap\n"


def decorator(points: Sequence[str], partial: tuple[str, ...]) -> cst.Decorator:
    """The decorator that records the points of a tapped class.

    Args:
        points: all of them.
        partial: those that hold partial sums where there are several ranks.
    """
    names = ", ".join(f'"{point}"' for point in points)
    facts = f", partial={partial}" if partial else ""
    return cst.Decorator(cst.parse_expression(f"residual_tap.tapped({names}{facts})"))


def members(rule: Rule) -> list[cst.BaseStatement]:
    """The properties `hook_points_unless`, `_lacking`, `_runs` and `_streams`.

    Those that a rule needs.
    """
    pairs = "".join(f"({met}, {why!r}),\n" for met, why in rule.unless.items())
    texts = [_PROPERTY.format(pairs=indent(pairs, " " * 8))] if pairs else []
    few = [(one.lacking, one.points, one.why) for one in rule.sometimes]
    pairs = "".join(f"({met}, {names!r}, {why!r}),\n" for met, names, why in few)
    texts += [_LACKING.format(pairs=indent(pairs, " " * 8))] if pairs else []
    texts += [_RUNS.format(runs=rule.runs)] if rule.runs else []
    texts += [_STREAMS.format(streams=rule.streams)] if rule.streams else []
    statements = [cst.parse_statement(text) for text in texts]
    line = cst.EmptyLine(indent=False)
    return [node.with_changes(leading_lines=[line]) for node in statements]


Decorations = Mapping[cst.ClassDef, tuple[cst.Decorator, list[cst.BaseStatement]]]
"""By class: the decorator, and the members to append."""


def insert(
    tree: cst.Module, sites: Sequence[Site], decorations: Decorations
) -> cst.Module:
    """`tree` with a call at every site and each class decorated.

    Every site must be in one of the decorated classes.
    """
    writer = _Writer(sites, decorations)
    body = list(tree.body)
    for index, node in enumerate(body):
        if isinstance(node, cst.ClassDef) and node in decorations:
            visited = node.visit(writer)
            assert isinstance(visited, cst.ClassDef)
            body[index] = visited
    return tree.with_changes(body=_with_import(body))


def _with_import(
    body: Sequence[cst.BaseCompoundStatement | cst.SimpleStatementLine],
) -> list[cst.BaseCompoundStatement | cst.SimpleStatementLine]:
    """Add our import after the last import that precedes the first definition."""
    imports = m.SimpleStatementLine(body=[m.Import() | m.ImportFrom()])
    definitions = (cst.ClassDef, cst.FunctionDef)
    end = next(i for i, node in enumerate(body) if isinstance(node, definitions))
    last = max(i for i, node in enumerate(body[:end]) if m.matches(node, imports))
    return [*body[: last + 1], cst.parse_statement(_IMPORT), *body[last + 1 :]]


def call(site: Site) -> str:
    """The call as source text."""
    run = (f"run={site.run}",) if site.run else ()
    arguments = ", ".join(("self", f'"{site.point}"', *site.arguments, *run))
    method = f"residual_tap.{site.method}"
    if site.condition:
        method = f"(residual_tap.partial if {site.condition} else {method})"
    if site.split_when:
        # A rank's share of the tokens is never a partial sum.
        split = f"residual_tap.split_{site.method.replace('partial', 'pair')}"
        method = f"({split} if {site.split_when} else {method})"
    return f"{method}({arguments})"


def _statements(site: Site) -> list[cst.BaseStatement]:
    assert all(name.isidentifier() for name in site.arguments), site.arguments
    lines = (f"{', '.join(site.arguments)} = {call(site)}", *site.then)
    return [cst.parse_statement(f"{line}\n") for line in lines]


class _Writer(cst.CSTTransformer):
    def __init__(self, sites: Sequence[Site], decorations: Decorations) -> None:
        super().__init__()
        self.sites = sites
        self.decorations = decorations

    def leave_SimpleStatementLine(
        self,
        original_node: cst.SimpleStatementLine,
        updated_node: cst.SimpleStatementLine,
    ) -> cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement]:
        return self.around(original_node, updated_node)

    def on_leave(self, original_node: cst.CSTNode, updated_node: Any) -> Any:
        updated = super().on_leave(original_node, updated_node)
        if isinstance(updated, cst.BaseExpression):
            for site in (s for s in self.sites if s.statement is original_node):
                wrapped = replace(site, arguments=(code(updated),))
                updated = cst.parse_expression(call(wrapped))
        return updated

    def leave_If(
        self, original_node: cst.If, updated_node: cst.If
    ) -> cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement]:
        return self.around(original_node, updated_node)

    def around(
        self, original: cst.CSTNode, updated: cst.BaseStatement
    ) -> cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement]:
        before: list[cst.BaseStatement] = []
        after: list[cst.BaseStatement] = []
        for site in (s for s in self.sites if s.statement is original):
            if not all(name.isidentifier() for name in site.arguments):
                updated = _wrapped(updated, site)
            else:
                (after if site.after else before).extend(_statements(site))
        if not before and not after:
            return updated
        return cst.FlattenSentinel([*before, updated, *after])

    def leave_FunctionDef(
        self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef
    ) -> cst.FunctionDef:
        here = [s for s in self.sites if s.statement is original_node]
        if not here:
            return updated_node
        body = list(updated_node.body.body)
        at = 1 if updated_node.get_docstring() is not None else 0
        new = [statement for site in here for statement in _statements(site)]
        return updated_node.with_deep_changes(
            updated_node.body, body=[*body[:at], *new, *body[at:]]
        )

    def leave_ClassDef(
        self, original_node: cst.ClassDef, updated_node: cst.ClassDef
    ) -> cst.ClassDef:
        if original_node not in self.decorations:
            return updated_node
        first, more = self.decorations[original_node]
        body = [*updated_node.body.body, *more]
        return updated_node.with_changes(
            decorators=[first, *updated_node.decorators],
            body=updated_node.body.with_changes(body=body),
        )


def _wrapped(line: cst.BaseStatement, site: Site) -> cst.SimpleStatementLine:
    """`return f(x), residual` as `return residual_tap.pair(..., f(x), residual)`."""
    assert isinstance(line, cst.SimpleStatementLine)
    node = line.body[0]
    assert isinstance(node, cst.Return) and node.value is not None, code(line)
    value = node.value
    elements = value.elements if isinstance(value, cst.Tuple) else ()
    parts = tuple(code(element.value) for element in elements) or (code(value),)
    assert len(parts) >= len(site.arguments), f"returns too little: {code(line)}"
    wrapped = cst.parse_expression(
        call(replace(site, arguments=parts[: len(site.arguments)]))
    )
    if len(parts) > len(site.arguments):  # a residual that the next layer does not read
        first = cst.Element(wrapped)
        rest = elements[len(site.arguments) :]
        wrapped = cst.ensure_type(value, cst.Tuple).with_changes(
            elements=[first, *rest]
        )
    return line.with_changes(body=[node.with_changes(value=wrapped)])

# SPDX-License-Identifier: Apache-2.0
"""Anchors: a statement, several in a row, or the header of a compound statement."""

import re
from dataclasses import dataclass
from textwrap import dedent

import libcst as cst

from fork.language.pattern import header_matches, matches
from fork.language.tree import Place

# A clause cannot be parsed alone: the statement to parse it in, and its field there.
_CLAUSES = (
    (re.compile(r"elif\b"), "if 0:\n    pass\n{} pass", "orelse"),
    (re.compile(r"else\s*:"), "if 0:\n    pass\n{} pass", "orelse"),
    (re.compile(r"except\b"), "try:\n    pass\n{} pass", "handlers"),
    (re.compile(r"finally\s*:"), "try:\n    pass\n{} pass", "finalbody"),
    (re.compile(r"case\b"), "match 0:\n    {} pass", "cases"),
)


@dataclass(frozen=True, slots=True)
class Anchor:
    """A parsed anchor."""

    statements: tuple[cst.CSTNode, ...]
    by_header: bool
    """Whether the last statement is matched only up to its colon."""
    is_clause: bool = False

    def matches(self, place: Place) -> bool:
        """Whether the anchor's statements begin at `place`."""
        if place.is_clause != self.is_clause:
            return False
        end = place.index + len(self.statements)
        found = place.siblings[place.index : end]
        return len(found) == len(self.statements) and all(
            self._matches_one(pattern, node)
            for pattern, node in zip(self.statements, found, strict=True)
        )

    def _matches_one(self, pattern: cst.CSTNode, node: cst.CSTNode) -> bool:
        if self.by_header and pattern is self.statements[-1]:
            return header_matches(pattern, node)
        if isinstance(pattern, cst.SimpleStatementLine) and isinstance(
            node, cst.SimpleStatementLine
        ):
            return any(matches(pattern.body[0], small) for small in node.body)
        return matches(pattern, node)

    def last_node(self, place: Place) -> cst.CSTNode:
        """The node that the anchor's last statement matched."""
        return place.siblings[place.index + len(self.statements) - 1]


def parse_anchor(text: str) -> Anchor:
    """Parse an anchor; one that ends in a colon is a header.

    Raises:
        ValueError: the text is not valid code.
    """
    code = dedent(text).strip()
    try:
        return _parse(code)
    except cst.ParserSyntaxError as error:
        raise ValueError(
            f"anchor={text!r}: not a statement ({error.message})"
        ) from None


def _parse(code: str) -> Anchor:
    if not code.endswith(":"):
        return Anchor(_statements(code), by_header=False)
    for keyword, template, field in _CLAUSES:
        if keyword.match(code):
            holder = _statements(template.format(code))[0]
            clause = getattr(holder, field)
            node = clause[0] if isinstance(clause, (list, tuple)) else clause
            return Anchor((node,), by_header=True, is_clause=True)
    if code == "try:":
        whole = _statements("try:\n    pass\nfinally:\n    pass")
        return Anchor(whole, by_header=True)
    # `...` is no parameter name, so `def f(...):` is written with the other wildcard.
    code = re.sub(r"(\bdef \w+)\(\.\.\.\)", r"\1(__)", code)
    return Anchor(_statements(code + " pass"), by_header=True)


def _statements(code: str) -> tuple[cst.CSTNode, ...]:
    body = tuple(cst.parse_module(code).body)
    if not body:
        raise ValueError("anchor='': name the statement the edit belongs to")
    return body

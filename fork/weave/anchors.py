# SPDX-License-Identifier: Apache-2.0
"""Finds the statements that a rule's anchors name."""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst
import libcst.matchers as m

from .layer_class import LayerClass, code
from .placement import Site
from .rules import Anchor
from .stream import Unprovable


def resolve(cls: LayerClass, anchors: Sequence[Anchor]) -> list[Site]:
    """The site of each anchor in the methods of a class.

    Raises:
        Unprovable: an anchor matches no statement, or several.
    """
    return [
        Site(
            anchor.point,
            anchor.method,
            anchor.arguments,
            _statement(cls, anchor),
            anchor.after,
        )
        for anchor in anchors
    ]


def _statement(cls: LayerClass, anchor: Anchor) -> cst.CSTNode:
    if anchor.within not in cls.methods:
        raise Unprovable(f"the rule's anchor is in {anchor.within}, which is not there")
    statements = m.findall(cls.methods[anchor.within], m.SimpleStatementLine() | m.If())
    found = [node for node in statements if _text(node).startswith(anchor.statement)]
    if len(found) != 1:
        raise Unprovable(
            f"the rule's anchor {anchor.statement!r} begins {len(found)} statements"
        )
    return found[0]


def _text(node: cst.CSTNode) -> str:
    return code(node.with_changes(leading_lines=()))

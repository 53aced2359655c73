# SPDX-License-Identifier: Apache-2.0
"""The edit language: small structural edits of upstream modules, written as data.

An edit file is at the upstream module's path under `fork/edits/`, states in its
docstring why the module is edited, and lists its edits:

    EDITS = [
        add_import("from vllm.v1.capture import admit", why="..."),
        after(scope="Engine.add", anchor="self.check(request)",
              insert="admit(request)", why="..."),
    ]

Anchors are code and match by structure, so whitespace, comments, quotes and trailing
commas never matter. Every anchor is looked up in the untouched upstream module: edits
of one file do not see each other, and edits at one place keep the order of the list.
What is not edited is preserved byte for byte.
"""

from fork.language.edit import Edit, since, until
from fork.language.expressions import add_argument, add_parameter, replace
from fork.language.statements import (
    add_base,
    add_decorator,
    add_field,
    add_import,
    after,
    before,
    first,
    last,
)
from fork.language.weave import EditFile, Woven, weave

__all__ = [
    "Edit",
    "EditFile",
    "Woven",
    "add_argument",
    "add_base",
    "add_decorator",
    "add_field",
    "add_import",
    "add_parameter",
    "after",
    "before",
    "first",
    "last",
    "replace",
    "since",
    "until",
    "weave",
]

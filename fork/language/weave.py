# SPDX-License-Identifier: Apache-2.0
"""Weave the edits of one file into one upstream module."""

import re
from dataclasses import dataclass

import libcst as cst

from fork.language.apply import apply_changes
from fork.language.edit import Change, Edit
from fork.language.problems import Finding, Problem, Unfit
from fork.language.tree import Tree


@dataclass(frozen=True, slots=True)
class EditFile:
    """The edits of one upstream module."""

    path: str
    """Path of the edit file, for messages."""
    module: str
    """Path of the upstream module, `vllm/...`."""
    why: str
    """The edit file's docstring."""
    edits: tuple[Edit, ...]


@dataclass(frozen=True, slots=True)
class Woven:
    """A woven module; `source` is None if something does not fit."""

    source: str | None
    problems: tuple[Problem, ...] = ()


def weave(source: str, file: EditFile, version: str) -> Woven:
    """Apply all edits of `file` to the upstream `source` of release `version`.

    All problems are collected, so that one run reports everything.
    """
    try:
        tree = Tree(source)
    except cst.ParserSyntaxError as error:
        unfit = Unfit(f"upstream does not parse, line {error.raw_line}")
        return Woven(None, (_whole(file, version, unfit),))
    changes: list[Change] = []
    problems: list[Problem] = []
    for edit in file.edits:
        if not edit.applies_to(version):
            continue
        result = edit.resolve(tree)
        if isinstance(result, tuple):
            changes += result
        else:
            problems.append(_about(file, edit, version, result))
    if problems:
        return Woven(None, tuple(problems))
    return _compiled(apply_changes(tree, changes), file, version)


def _compiled(source: str, file: EditFile, version: str) -> Woven:
    try:
        compile(source, file.module, "exec", dont_inherit=True)
    except SyntaxError as error:
        unfit = Unfit(f"the result does not compile, line {error.lineno}: {error.msg}")
        return Woven(None, (_whole(file, version, unfit),))
    return Woven(source)


def _whole(file: EditFile, version: str, finding: Finding) -> Problem:
    """A problem that concerns the whole file."""
    return Problem(
        edit_file=file.path,
        line=1,
        operation="the edits",
        subject="EDITS",
        module=file.module,
        version=version,
        finding=finding,
    )


def _about(file: EditFile, edit: Edit, version: str, finding: Finding) -> Problem:
    """A problem with one edit."""
    return Problem(
        edit_file=file.path,
        line=edit.line,
        operation=_operation(edit),
        subject=" ".join(edit.subject.split()),
        module=file.module,
        version=version,
        finding=finding,
    )


def _operation(edit: Edit) -> str:
    below = getattr(edit, "below", None)
    at_end = getattr(edit, "at_end", None)
    if below is not None:
        return "after" if below else "before"
    if at_end is not None:
        return "last" if at_end else "first"
    return re.sub(r"(?<!^)([A-Z])", r"_\1", type(edit).__name__).lower()

# SPDX-License-Identifier: Apache-2.0
"""Weaves a miniature source and compares the result."""

from textwrap import dedent

from fork.language import Edit, EditFile, Problem, Woven, weave

EDIT_FILE = "fork/edits/vllm/mini.py"
MODULE = "vllm/mini.py"
VERSION = "9.9.9"


def run(source: str, *edits: Edit) -> Woven:
    file = EditFile(EDIT_FILE, MODULE, "a test", tuple(edits))
    return weave(dedent(source), file, VERSION)


def assert_woven(before: str, after: str, *edits: Edit) -> None:
    woven = run(before, *edits)
    assert woven.problems == (), woven.problems[0].sentence()
    assert woven.source == dedent(after)


def only_problem(source: str, *edits: Edit) -> Problem:
    woven = run(source, *edits)
    assert woven.source is None
    assert len(woven.problems) == 1, [p.sentence() for p in woven.problems]
    return woven.problems[0]

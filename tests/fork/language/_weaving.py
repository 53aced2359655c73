# SPDX-License-Identifier: Apache-2.0
"""Weaves a miniature source and compares the result."""

from textwrap import dedent

from fork.errors import Fault
from fork.language import Edit, EditFile, Woven, weave

EDIT_FILE = "fork/edits/vllm/mini.py"
MODULE = "vllm/mini.py"
VERSION = "9.9.9"


def run(source: str, *edits: Edit) -> Woven:
    file = EditFile(EDIT_FILE, MODULE, tuple(edits))
    return weave(dedent(source), file, VERSION)


def assert_woven(before: str, after: str, *edits: Edit) -> None:
    woven = run(before, *edits)
    assert woven.faults == (), woven.faults[0].sentence
    assert woven.source == dedent(after)


def only_fault(source: str, *edits: Edit) -> Fault:
    woven = run(source, *edits)
    assert woven.source is None
    assert len(woven.faults) == 1, [fault.sentence for fault in woven.faults]
    return woven.faults[0]

# SPDX-License-Identifier: Apache-2.0
"""Weave the edits of one file into one upstream module."""

from dataclasses import dataclass

from fork.errors import Fault
from fork.language.edit import Edit, Misfit, Splice
from fork.language.source import Source


@dataclass(frozen=True, slots=True)
class EditFile:
    """The edits of one upstream module."""

    path: str
    """Path of the edit file, for messages."""
    module: str
    """Path of the upstream module, `vllm/...`."""
    edits: tuple[Edit, ...]


@dataclass(frozen=True, slots=True)
class Woven:
    """A woven module; `source` is None if something does not fit."""

    source: str | None
    faults: tuple[Fault, ...] = ()


def weave(source: str, file: EditFile, version: str) -> Woven:
    """Apply all edits of `file` to the upstream `source` of release `version`.

    All faults are collected, so that one run reports everything.
    """
    try:
        upstream = Source(source, file.module)
    except SyntaxError as error:
        return _unfit(file, version, f"upstream does not parse, line {error.lineno}")
    splices: list[Splice] = []
    faults: list[Fault] = []
    for edit in file.edits:
        if edit.applies_to(version):
            try:
                splices += edit.resolve(upstream)
            except Misfit as misfit:
                faults.append(_fault(file, edit, version, misfit))
    if faults:
        return Woven(None, tuple(faults))
    woven = _spliced(upstream.data, splices)
    try:
        compile(woven, file.module, "exec", dont_inherit=True)
    except SyntaxError as error:
        text = f"the result does not compile, line {error.lineno}: {error.msg}"
        return _unfit(file, version, text)
    return Woven(woven)


def _spliced(data: bytes, splices: list[Splice]) -> str:
    pieces, done = [], 0
    for splice in sorted(splices, key=lambda splice: (splice.start, splice.rank)):
        assert splice.start >= done, "two edits replace the same code"
        pieces += [data[done : splice.start], splice.new]
        done = splice.end
    return b"".join([*pieces, data[done:]]).decode()


def _unfit(file: EditFile, version: str, text: str) -> Woven:
    """A fault that concerns the whole file."""
    sentence = (
        f"{file.path}:1: the edits `EDITS` cannot be applied to {file.module}: {text} "
        f"(vLLM {version})."
    )
    return Woven(None, (Fault(file.path, file.module, "Unfit", sentence),))


def _fault(file: EditFile, edit: Edit, version: str, misfit: Misfit) -> Fault:
    """One sentence naming edit file, operation, anchor, module and version."""
    subject = " ".join(edit.subject.split())
    sentence = (
        f"{file.path}:{edit.line}: {edit.operation} `{subject}` {misfit} "
        f"(vLLM {version})."
    )
    return Fault(file.path, file.module, misfit.kind, sentence)

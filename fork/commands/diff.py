# SPDX-License-Identifier: Apache-2.0
"""Print the whole fork as one unified diff against upstream."""

import argparse
import difflib
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass

from fork.building.builder import Built, build
from fork.building.contents import Added, Text
from fork.commands._options import add_build_options, order_from


@dataclass(frozen=True, slots=True)
class FileDiff:
    """The diff of one file."""

    path: str
    kind: str
    """`edited` or `added`."""
    lines: tuple[str, ...]

    @property
    def plus(self) -> int:
        """Lines added."""
        return sum(line.startswith("+") for line in self.lines[2:])

    @property
    def minus(self) -> int:
        """Lines removed."""
        return sum(line.startswith("-") for line in self.lines[2:])


def difference(built: Built) -> list[FileDiff]:
    """The diffs of edited files, then of added files, each sorted by path."""
    edited, added = [], []
    for path, content in sorted(built.contents.items()):
        if not path.startswith("vllm/"):
            continue
        if isinstance(content, Text):
            old = (built.release.root / path).read_text(encoding="utf-8")
            edited.append(_diff(path, "edited", old, content.data.decode()))
        elif isinstance(content, Added):
            added.append(_diff(path, "added", None, _text_of(content)))
    return [file for file in edited + added if file.lines]


def _text_of(content: Added) -> str:
    try:
        return content.path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return f"(binary, {content.path.stat().st_size} bytes)\n"


def _diff(path: str, kind: str, old: str | None, new: str) -> FileDiff:
    lines = difflib.unified_diff(
        (old or "").splitlines(keepends=True),
        new.splitlines(keepends=True),
        fromfile="/dev/null" if old is None else f"a/{path}",
        tofile=f"b/{path}",
    )
    return FileDiff(path, kind, tuple(map(_ended, lines)))


def _ended(line: str) -> str:
    return line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_build_options(parser)
    parser.add_argument("--stat", action="store_true", help="count lines per file only")


def run(arguments: argparse.Namespace) -> int:
    """Print the diff; returns 0."""
    with redirect_stdout(sys.stderr):  # only the diff goes to stdout
        built = build(order_from(arguments))
    files = difference(built)
    try:
        _print_stat(files) if arguments.stat else _print_diff(files)
        sys.stdout.flush()
    except BrokenPipeError:  # a pager was closed early
        sys.stderr.close()
    return 0


def _print_diff(files: list[FileDiff]) -> None:
    for file in files:
        sys.stdout.writelines(file.lines)


def _print_stat(files: list[FileDiff]) -> None:
    for file in files:
        print(f"{file.kind:<6} +{file.plus:<5} -{file.minus:<5} {file.path}")
    plus = sum(file.plus for file in files)
    minus = sum(file.minus for file in files)
    print(f"{len(files)} files, +{plus} -{minus} lines")

# SPDX-License-Identifier: Apache-2.0
"""Print the whole fork as one unified diff against upstream."""

import argparse
import sys
from contextlib import redirect_stdout

from fork.building.builder import build
from fork.building.diff import FileDiff, difference
from fork.commands._options import add_build_options, order_from


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

# SPDX-License-Identifier: Apache-2.0
"""List upstream's architectures and their hook points."""

import argparse
import sys
from contextlib import redirect_stdout

from fork.architectures.reports import reports, show
from fork.builder import open_release
from fork.commands._options import add_build_options, order_from


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_build_options(parser)
    parser.add_argument("--json", action="store_true", help="print a JSON report")


def run(arguments: argparse.Namespace) -> int:
    """Print; 0 unless the release cannot be had."""
    with redirect_stdout(sys.stderr):
        release = open_release(order_from(arguments))
    show(reports(release.root), arguments.json)
    return 0

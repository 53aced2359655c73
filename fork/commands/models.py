# SPDX-License-Identifier: Apache-2.0
"""List upstream's architectures and their hook points."""

import argparse
import json
import sys
from contextlib import redirect_stdout
from dataclasses import asdict

from fork.architectures.library import installed
from fork.architectures.page import lines, page
from fork.architectures.reports import reports
from fork.building.builder import open_release
from fork.commands._options import add_build_options, order_from


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_build_options(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print a JSON report")
    form.add_argument(
        "--markdown",
        action="store_true",
        help="print the page docs/reference/supported_models.md",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the architectures; returns 0."""
    order = order_from(arguments)
    with redirect_stdout(sys.stderr):
        release = open_release(order)
    rows = reports(release.root, library=installed())
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    elif arguments.markdown:
        path = order.checkout.parity_results
        print(page(rows, json.loads(path.read_text()) if path.exists() else {}), end="")
    else:
        print("\n".join(lines(rows)))
    return 0

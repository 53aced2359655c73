# SPDX-License-Identifier: Apache-2.0
"""Print the page of upstream's architectures and their hook points."""

import argparse
import json
import sys
from contextlib import redirect_stdout

from fork.architectures.library import installed
from fork.architectures.page import page
from fork.architectures.reports import reports
from fork.building.builder import open_release
from fork.commands._options import add_build_options, order_from

add_arguments = add_build_options


def run(arguments: argparse.Namespace) -> int:
    """Print docs/reference/supported_models.md; returns 0."""
    order = order_from(arguments)
    with redirect_stdout(sys.stderr):
        release = open_release(order)
    rows = reports(release.root, library=installed())
    path = order.checkout.parity_results
    print(page(rows, json.loads(path.read_text()) if path.exists() else {}), end="")
    return 0

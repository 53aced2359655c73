# SPDX-License-Identifier: Apache-2.0
"""Print the release of torch that upstream's wheel asks for, as pip takes it."""

import argparse
import re
import sys
from contextlib import redirect_stdout

from fork.building.builder import open_release
from fork.building.metadata import fork_metadata
from fork.commands._options import add_build_options, order_from

add_arguments = add_build_options


def run(arguments: argparse.Namespace) -> int:
    """Print the requirement; returns 0."""
    order = order_from(arguments)
    with redirect_stdout(sys.stderr):
        release = open_release(order)
    metadata = fork_metadata(order.checkout, release, order.device, release.version)
    requirements = metadata.install_requires()
    print(next(filter(None, (re.match(r"torch==[\d.]+", r) for r in requirements)))[0])
    return 0

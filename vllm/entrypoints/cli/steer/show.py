# SPDX-License-Identifier: Apache-2.0
"""`vllm steer show`."""

import argparse
from typing import Any

from vllm.entrypoints.cli.steer.options import add_reading_arguments, reading_of


def add_arguments(parser: Any) -> None:
    """Add the options."""
    parser.add_argument("source", help="A file of vectors in any form, or an SAE.")
    add_reading_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Print the vectors' layers, hook points, norms and provenance."""
    from vllm.steering.convert import read_vectors
    from vllm.steering.tables import vectors_table

    print(vectors_table(read_vectors(args.source, reading_of(args))))

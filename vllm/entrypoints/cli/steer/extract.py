# SPDX-License-Identifier: Apache-2.0
"""`vllm steer extract`."""

import argparse
from typing import Any

from vllm.entrypoints.cli.steer.options import (
    add_shared,
    check_engine,
    check_out,
    resolve_address,
    started_engine,
)
from vllm.v1.residual.tap import OPTIONAL_POINTS
from vllm.v1.steering.errors import fail


def add_arguments(parser: Any) -> None:
    """Add the options."""
    parser.add_argument(
        "--pairs",
        required=True,
        metavar="FILE",
        help='JSON Lines of {"positive": ..., "negative": ...}, texts or chats.',
    )
    add_shared(parser, "--out", "--hook", "--layers", "--position")
    parser.add_argument(
        "--method",
        choices=("mean", "pca"),
        default="mean",
        help="mean: mean of the differences. pca: their first principal component, "
        "scaled to the mean difference along it.",
    )


def check(args: argparse.Namespace) -> None:
    """Check what needs no model."""
    from vllm.steering.pairs import read_pairs

    resolve_address(args)
    read_pairs(args.pairs)
    check_out(args, fail, "; vllm steer convert writes other forms")
    check_engine(args)


def run(args: argparse.Namespace) -> None:
    """Extract and save vectors; print how well each one separates the pairs."""
    from vllm.steering.extract import extract
    from vllm.steering.pairs import read_pairs
    from vllm.steering.tables import separation_table

    pairs = read_pairs(args.pairs)
    optional = [args.hook] if args.hook in OPTIONAL_POINTS else None
    with started_engine(args, enable_readouts=True, hook_points=optional) as llm:
        found = extract(llm, pairs, args.hook, args.layers, args.method, args.position)
    found.vectors.save(args.out)
    print(separation_table(found.directions))
    print(f"\nwritten: {args.out} ({found.vectors.provenance.origin})")

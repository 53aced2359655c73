# SPDX-License-Identifier: Apache-2.0
"""`vllm steer extract`."""

import argparse
from pathlib import Path
from typing import Any

from vllm.entrypoints.cli.steer.options import (
    add_hook_argument,
    add_layers_argument,
    resolve_address,
    started_engine,
)
from vllm.v1.steering.errors import fail


def add_arguments(parser: Any) -> None:
    """Add the options."""
    parser.add_argument(
        "--pairs",
        required=True,
        metavar="FILE",
        help='JSON Lines of {"positive": ..., "negative": ...}, texts or chats.',
    )
    parser.add_argument(
        "--out",
        required=True,
        type=Path,
        metavar="FILE",
        help="Output file, which ends in .safetensors.",
    )
    add_hook_argument(parser)
    add_layers_argument(parser)
    parser.add_argument(
        "--method",
        choices=("mean", "pca"),
        default="mean",
        help="mean: mean of the differences. pca: their first principal component, "
        "scaled to the mean difference along it.",
    )
    parser.add_argument(
        "--position",
        choices=("last", "mean"),
        default="last",
        help="Use a text's last token, or the mean of all tokens.",
    )


def run(args: argparse.Namespace) -> None:
    """Extract and save vectors; print how well each one separates the pairs."""
    from vllm.steering.extract import CONSUMER, extract
    from vllm.steering.pairs import read_pairs
    from vllm.steering.tables import separation_table

    resolve_address(args)
    pairs = read_pairs(args.pairs)
    if args.out.suffix != ".safetensors" or not args.out.absolute().parent.is_dir():
        raise fail(
            f"out: {str(args.out)!r} must end in .safetensors, in an existing folder; "
            "vllm steer convert writes other forms",
            "out",
            str(args.out),
        )
    needs_mlp = args.hook.startswith("mlp")
    fields = {"mlp_hook_points": True} if needs_mlp else {}
    with started_engine(args, capture_consumers=[CONSUMER], **fields) as llm:
        found = extract(llm, pairs, args.hook, args.layers, args.method, args.position)
    found.vectors.save(args.out)
    print(separation_table(found.directions))
    print(f"\nwritten: {args.out} ({found.vectors.provenance.origin})")

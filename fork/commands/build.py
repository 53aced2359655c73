# SPDX-License-Identifier: Apache-2.0
"""Build the fork into a tree that Python can import."""

import argparse
import time
from pathlib import Path

from fork.building.builder import build_tree
from fork.commands._options import add_build_options, order_from


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_build_options(parser)
    parser.add_argument("--out", type=Path, help="default: build/DEVICE[-VERSION]")


def run(arguments: argparse.Namespace) -> int:
    """Build the tree; returns 0."""
    start = time.perf_counter()
    order = order_from(arguments)
    out = arguments.out or order.checkout.tree(order.device, order.upstream)
    out = out.absolute()
    print(f"fork build for {order.device}", flush=True)
    built = build_tree(order, out)
    seconds = time.perf_counter() - start
    print(f"built vllm {built.metadata.version} in {seconds:.1f} s")
    return 0

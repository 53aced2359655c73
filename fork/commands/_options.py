# SPDX-License-Identifier: Apache-2.0
"""Options shared by several commands."""

import argparse
import os
from pathlib import Path

from fork.building.builder import Order
from fork.errors import BuildFailure
from fork.paths import HERE
from fork.upstream.pins import DEVICES, default_device


def add_build_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that select the wheel."""
    parser.add_argument(
        "--device",
        choices=DEVICES,
        help="default: VLLM_TARGET_DEVICE, else cuda with an NVIDIA driver, else cpu",
    )
    parser.add_argument(
        "--upstream", metavar="VERSION", help="a release other than the default one"
    )
    parser.add_argument("--wheel", type=Path, help="build on this upstream wheel")
    parser.add_argument("--wheel-sha256", help="the hash that --wheel must have")
    parser.add_argument(
        "--jobs", type=int, default=min(4, os.cpu_count() or 1), help="processes"
    )


def order_from(arguments: argparse.Namespace) -> Order:
    """The build order that the options describe.

    Raises:
        BuildFailure: the options contradict each other.
    """
    if arguments.wheel_sha256 and not arguments.wheel:
        raise BuildFailure("--wheel-sha256 needs --wheel: the pinned wheel has its own")
    if arguments.jobs < 1:
        raise BuildFailure(f"--jobs {arguments.jobs}: must be at least 1")
    return Order(
        device=arguments.device or default_device(),
        upstream=arguments.upstream,
        wheel=arguments.wheel,
        wheel_sha256=arguments.wheel_sha256,
        jobs=arguments.jobs,
        checkout=HERE,
    )

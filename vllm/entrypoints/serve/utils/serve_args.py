# SPDX-License-Identifier: Apache-2.0
"""Completes and checks the command line of `vllm serve`."""

from argparse import Namespace
from typing import Any

from vllm.entrypoints.serve.steering.authority import ENABLING
from vllm.logger import init_logger

logger = init_logger(__name__)

KEEPING = ("memory", "patch_source")
"""Consumers that keep rows in the process of the API server."""


def complete(args: Namespace) -> None:
    """Refuse gRPC with our features, and start one API server where rows are kept.

    By default upstream starts one for each data-parallel engine. Each would keep the
    rows of its own requests, and a client does not choose which one answers it.

    Raises:
        ValueError: an option cannot be used with gRPC.

    """
    if getattr(args, "grpc", False):
        refuse_grpc(args)
    if args.api_server_count is not None or args.headless:
        return
    names = [*map(_name, args.capture_consumers or ())]
    if args.enable_patching or any(name in KEEPING for name in names):
        args.api_server_count = 1
        if args.data_parallel_size > 1:
            logger.info("Starting one API server, which keeps the captured rows.")


def _name(entry: Any) -> Any:
    """The consumer's name in an entry of the command line or a file."""
    if isinstance(entry, dict):
        return entry.get("name")
    return str(entry).partition(":")[0]


def refuse_grpc(args: Namespace) -> None:
    """Reject options whose request fields a gRPC server would ignore.

    Protocol buffers silently drop unknown fields, and the messages of upstream's
    gRPC server have none for capture, steering or readouts.

    Raises:
        ValueError: one of the options is given.

    """
    given = vars(args)
    for name in (*ENABLING, "enable_lens_page"):
        if given.get(name):
            option = name.replace("_", "-")
            raise ValueError(
                f"--{option}: the gRPC server (--grpc) has no fields for capture, "
                "steering and readouts, and would ignore them; serve HTTP by leaving "
                "out --grpc"
            )

# SPDX-License-Identifier: Apache-2.0
"""Rejects `vllm serve --grpc` with features that its protocol cannot carry."""

from argparse import Namespace

OPTIONS = {
    "capture_consumers": "--capture-consumers",
    "enable_steering": "--enable-steering",
    "enable_readouts": "--enable-readouts",
    "vllm_lens_api": "--vllm-lens-api",
    "interp_engine_api": "--interp-engine-api",
    "enable_patching": "--enable-patching",
    "enable_lens_page": "--enable-lens-page",
}
"""Options, by attribute of the parsed command line."""


def refuse_grpc(args: Namespace) -> None:
    """Reject options whose request fields a gRPC server would ignore.

    Protocol buffers silently drop unknown fields, and the messages of upstream's
    gRPC server have none for capture, steering or readouts.

    Raises:
        ValueError: one of the options is given.

    """
    given = vars(args)
    for attribute, option in OPTIONS.items():
        if given.get(attribute):
            raise ValueError(
                f"{option}: the gRPC server (--grpc) has no fields for capture, "
                "steering and readouts, and would ignore them; serve HTTP by leaving "
                "out --grpc"
            )

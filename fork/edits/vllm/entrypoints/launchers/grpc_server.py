# SPDX-License-Identifier: Apache-2.0
"""A gRPC server does not start with features that it would ignore."""

from fork.language import first

EDITS = [
    first(
        scope="serve_grpc",
        insert="""
from vllm.entrypoints.serve.utils.serve_args import refuse_grpc

refuse_grpc(args)
""",
        why="It is also started as a module, not only by `vllm serve --grpc`.",
    ),
]

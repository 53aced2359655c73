# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` starts with features that its protocol and its processes can carry."""

from fork.language import add_import, before

EDITS = [
    add_import(
        "from vllm.entrypoints.serve.utils import serve_args",
        why="Checks and completes the options.",
    ),
    before(
        scope="ServeSubcommand.cmd",
        anchor='if getattr(args, "grpc", False):',
        insert="serve_args.complete(args)",
        why="The messages of gRPC have no fields for our features, and kept rows need "
        "a single API server.",
    ),
]

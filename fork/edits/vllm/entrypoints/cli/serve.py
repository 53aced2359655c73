# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` starts with features that its protocol and its processes can carry."""

from fork.language import before

EDITS = [
    before(
        scope="ServeSubcommand.cmd",
        anchor='if getattr(args, "grpc", False):',
        insert="""
from vllm.entrypoints.serve.utils import serve_args

serve_args.complete(args)
""",
        why="The messages of gRPC have no fields for our features, and kept rows need "
        "a single API server.",
    ),
]

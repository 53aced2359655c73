# SPDX-License-Identifier: Apache-2.0
"""A gRPC server does not start with features that it would ignore."""

from fork.language import add_import, before

EDITS = [
    add_import(
        "from vllm.entrypoints.serve.utils.grpc_refusal import refuse_grpc",
        why="Rejects such options.",
    ),
    before(
        scope="ServeSubcommand.cmd",
        anchor="from vllm.entrypoints.launchers.grpc_server import serve_grpc",
        insert="refuse_grpc(args)",
        why="The protocol's messages have no fields for our features.",
    ),
]

# SPDX-License-Identifier: Apache-2.0
"""A server that captures sends large responses on threads."""

from fork.language import add_import, after

EDITS = [
    add_import(
        "from vllm.entrypoints.serve.capture.connections import "
        "send_on_threads as capture_sends_on_threads",
        why="Chooses the server's connections.",
    ),
    after(
        scope="serve_http",
        anchor="config = uvicorn.Config(app, **uvicorn_kwargs)",
        insert="capture_sends_on_threads(config, app)",
        why="The connections are chosen before the configuration is loaded.",
    ),
]

# SPDX-License-Identifier: Apache-2.0
"""A server that captures sends large responses on threads."""

from fork.language import after

EDITS = [
    after(
        scope="serve_http",
        anchor="config = uvicorn.Config(app, **uvicorn_kwargs)",
        insert="""
from vllm.entrypoints.serve.capture.connections import send_on_threads

send_on_threads(config, app)
""",
        why="The connections are chosen before the configuration is loaded.",
    ),
]

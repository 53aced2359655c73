# SPDX-License-Identifier: Apache-2.0
"""Request bodies are bounded on servers with capture or steering."""

from fork.language import before

EDITS = [
    before(
        scope="build_app",
        anchor="init_exception_handler(app)",
        insert="""
from vllm.entrypoints.serve.utils.request_body import bound_bodies

bound_bodies(app, args)
""",
        why="All routes are mounted here, including those of plug-ins.",
    ),
]

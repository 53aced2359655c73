# SPDX-License-Identifier: Apache-2.0
"""Request bodies are bounded on servers with capture or steering."""

from fork.language import add_import, before

EDITS = [
    add_import(
        "from vllm.entrypoints.serve.utils.request_body import bound_bodies",
        why="Bounds the bodies of every route.",
    ),
    before(
        scope="build_app",
        anchor="init_exception_handler(app)",
        insert="bound_bodies(app, args)",
        why="All routes are mounted here, including those of plug-ins.",
    ),
]

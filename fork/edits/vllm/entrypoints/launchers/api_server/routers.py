# SPDX-License-Identifier: Apache-2.0
"""The server has routes for capture and steering."""

from fork.language import before

EDITS = [
    before(
        scope="register_api_routers",
        anchor='if getattr(args, "enable_fault_tolerance", False):',
        insert="""
if "generate" in supported_tasks:
    from vllm.entrypoints.serve.routers import attach_routers

    attach_routers(app, args)
""",
        why="Only generation is captured and steered. Routes are matched in order, and "
        "upstream's are requested far more often.",
    ),
]

# SPDX-License-Identifier: Apache-2.0
"""The server has routes for capture and steering."""

from fork.language import add_import, before

EDITS = [
    add_import(
        "from vllm.entrypoints.serve.capture.api_router import "
        "attach_router as attach_capture_router",
        why="The route, attached below.",
    ),
    add_import(
        "from vllm.entrypoints.serve.hooks.api_router import "
        "attach_router as attach_hooks_router",
        why="The routes, attached below.",
    ),
    add_import(
        "from vllm.entrypoints.serve.interp_engine.attach import "
        "attach_router as attach_interp_engine_router",
        why="The routes, attached below.",
    ),
    add_import(
        "from vllm.entrypoints.serve.readouts.api_router import "
        "attach_router as attach_readouts_router",
        why="The routes, attached below.",
    ),
    add_import(
        "from vllm.entrypoints.serve.steering.api_router import "
        "attach_router as attach_steering_router",
        why="The routes, attached below.",
    ),
    before(
        scope="register_api_routers",
        anchor='if getattr(args, "enable_fault_tolerance", False):',
        insert="""
if "generate" in supported_tasks:
    attach_capture_router(app)
    attach_steering_router(app, args)
    attach_readouts_router(app)
    attach_hooks_router(app, args)
    attach_interp_engine_router(app, args)
""",
        why="Only generation is captured and steered. Routes are matched in order, and "
        "upstream's are requested far more often.",
    ),
]

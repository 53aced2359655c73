# SPDX-License-Identifier: Apache-2.0
"""Offline users can steer every request."""

from fork.language import add_import, last

EDITS = [
    add_import(
        "from vllm.v1.capture.consumers.memory import api as kept_rows_api",
        why="Implements the methods below.",
    ),
    add_import(
        "from vllm.v1.hooks.frontend import api as hooks_api",
        why="Implements the methods below.",
    ),
    add_import(
        "from vllm.v1.readouts.frontend import api as readouts_api",
        why="Implements the methods below.",
    ),
    add_import(
        "from vllm.v1.steering.frontend import api as steering_api",
        why="Implements the methods below.",
    ),
    last(
        scope="LLM",
        insert="""
captured = kept_rows_api.captured
drop_captured = kept_rows_api.drop_captured
register_hooks = hooks_api.register_hooks
collect_hook_results = hooks_api.collect_hook_results
clear_hooks = hooks_api.clear_hooks
clear_hook_results = hooks_api.clear_hook_results
prefetch_params = hooks_api.prefetch_params
clear_prefetched = hooks_api.clear_prefetched
register_readout_module = readouts_api.register
unregister_readout_module = readouts_api.unregister
get_readouts = readouts_api.get
set_steering = steering_api.set_steering
clear_steering = steering_api.clear_steering
get_steering = steering_api.get_steering
""",
        why="Kept rows, hooks, global vectors, and modules that requests refer "
        "to by name.",
    ),
]

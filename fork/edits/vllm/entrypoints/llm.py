# SPDX-License-Identifier: Apache-2.0
"""Offline users can steer every request."""

from fork.language import add_import, last

EDITS = [
    add_import(
        "from vllm.v1.residual.frontend import methods as residual_methods",
        why="Implements the methods below.",
    ),
    last(
        scope="LLM",
        insert="""
captured = residual_methods.rows.captured
drop_captured = residual_methods.rows.drop_captured
register_hooks = residual_methods.hooks.register_hooks
collect_hook_results = residual_methods.hooks.collect_hook_results
clear_hooks = residual_methods.hooks.clear_hooks
clear_hook_results = residual_methods.hooks.clear_hook_results
prefetch_params = residual_methods.hooks.prefetch_params
clear_prefetched = residual_methods.hooks.clear_prefetched
register_readout_module = residual_methods.readouts.register
unregister_readout_module = residual_methods.readouts.unregister
get_readouts = residual_methods.readouts.get
set_steering = residual_methods.steering.set_steering
clear_steering = residual_methods.steering.clear_steering
get_steering = residual_methods.steering.get_steering
""",
        why="Kept rows, hooks, global vectors, and modules that requests refer "
        "to by name.",
    ),
]

# SPDX-License-Identifier: Apache-2.0
"""The serving engine has front ends of capture, steering and hooks."""

from fork.language import add_import, after, before, first, replace

EDITS = [
    add_import(
        """
from vllm.v1.residual.frontend import front_end as residual_front_end
from vllm.v1.residual.frontend import methods as residual_methods
""",
        why="The engine's interface to the features, and the methods below.",
    ),
    first(
        scope="AsyncLLM",
        insert="""
residual = residual_front_end.NO_FRONT_END
captured = residual_methods.rows.async_captured
drop_captured = residual_methods.rows.async_drop_captured
wait_for_capture_results = residual_methods.rows.async_wait_for_capture_results
register_hooks = residual_methods.hooks.async_register_hooks
collect_hook_results = residual_methods.hooks.async_collect_hook_results
clear_hooks = residual_methods.hooks.async_clear_hooks
clear_hook_results = residual_methods.hooks.async_clear_hook_results
prefetch_params = residual_methods.hooks.async_prefetch_params
clear_prefetched = residual_methods.hooks.async_clear_prefetched
register_readout_module = residual_methods.readouts.async_register
unregister_readout_module = residual_methods.readouts.async_unregister
get_readouts = residual_methods.readouts.async_get
set_steering = residual_methods.steering.async_set_steering
clear_steering = residual_methods.steering.async_clear_steering
get_steering = residual_methods.steering.async_get_steering
""",
        why="Kept rows, hooks, readout modules and global vectors.",
    ),
    before(
        scope="AsyncLLM.__init__",
        anchor="self._client_count = client_count",
        insert="""
self.residual = residual_front_end.open_front_end(self)
self.capture = self.residual.capture
self.steering = self.residual.control
self.hooks = self.residual.hooks
""",
        why="The core has started, so the model's hook points are known.",
    ),
    before(
        scope="AsyncLLM.add_request",
        anchor="is_pooling = isinstance(params, PoolingParams)",
        insert="params = await self.residual.prepare(params)",
        why="Parameters are bounded before a copy is made. Another API server may have "
        "registered a name since, and large vectors are parsed off the event loop.",
    ),
    after(
        scope="AsyncLLM._add_streaming_input_request",
        anchor="self._validate_streaming_input_sampling_params(sampling_params)",
        insert="self.residual.admit(request_id, sampling_params, 1, resumable=True)",
        why="Below, these parameters are used for a non-resumable request.",
    ),
    before(
        scope="AsyncLLM.generate",
        anchor="yield out",
        insert="""
if self.residual.concerns(out):
    await self.residual.complete(self, q.request_id, out, sampling_params)
""",
        why="The engine may have rejected its steering. Outputs carry rows, and the "
        "last one results, for which it may wait.",
    ),
    before(
        scope="AsyncLLM.shutdown",
        anchor='if engine_core := getattr(self, "engine_core", None):',
        insert='self.residual.settle(getattr(self, "engine_core", None))',
        why="A request that has been answered must not lose its capture, and this stop "
        "is not the engine's death.",
    ),
    before(
        scope="AsyncLLM.shutdown",
        anchor='handler = getattr(self, "output_handler", None)',
        insert="self.residual.close()",
        why="Stops the receiving thread: the engine has stopped.",
    ),
    replace(
        scope="AsyncLLM._run_output_handler.output_handler",
        anchor='logger.exception("AsyncLLM output_handler failed.")',
        by="residual_front_end.outputs_ended(logger, engine_core)",
        why="A stop that gives the engine time is not reported as its death, and calls "
        "that wait for the engine end.",
    ),
]

# SPDX-License-Identifier: Apache-2.0
"""The serving engine has front ends of capture and steering."""

from fork.language import add_import, after, before, last, replace

EDITS = [
    add_import(
        "from vllm.v1.residual import engine_stop",
        why="Logs the end of the outputs.",
    ),
    add_import(
        "from vllm.v1.residual import nonfinite_streams",
        why="Requests whose stream is no longer finite.",
    ),
    add_import(
        "from vllm.v1.capture.consumers.memory import api as kept_rows_api",
        why="Implements the methods below.",
    ),
    add_import(
        "from vllm.v1.hooks.frontend import api as hooks_api",
        why="Implements the methods below.",
    ),
    add_import(
        "from vllm.v1.hooks.frontend import attach as hooks_attaching",
        why="Creates the front end.",
    ),
    add_import(
        "from vllm.v1.readouts.frontend import api as readouts_api",
        why="Implements the methods below.",
    ),
    add_import(
        "from vllm.v1.capture.selectors import check_request_size",
        why="Bounds the size of a request's capture spec.",
    ),
    add_import(
        "from vllm.v1.capture.frontend import attach as capture_attaching",
        why="Creates the front end.",
    ),
    add_import(
        "from vllm.v1.steering.frontend import api as steering_api",
        why="Implements the methods below.",
    ),
    add_import(
        "from vllm.v1.steering.core import refusals as steering_refusals",
        why="Implements the calls below.",
    ),
    add_import(
        "from vllm.v1.steering.frontend import async_frontend as steering_serving",
        why="Creates the front end.",
    ),
    last(
        scope="AsyncLLM",
        insert="""
captured = kept_rows_api.async_captured
drop_captured = kept_rows_api.async_drop_captured
register_hooks = hooks_api.async_register_hooks
collect_hook_results = hooks_api.async_collect_hook_results
clear_hooks = hooks_api.async_clear_hooks
clear_hook_results = hooks_api.async_clear_hook_results
prefetch_params = hooks_api.async_prefetch_params
clear_prefetched = hooks_api.async_clear_prefetched
register_readout_module = readouts_api.async_register
unregister_readout_module = readouts_api.async_unregister
get_readouts = readouts_api.async_get
set_steering = steering_api.async_set_steering
clear_steering = steering_api.async_clear_steering
get_steering = steering_api.async_get_steering
""",
        why="Kept rows, global vectors and readout modules.",
    ),
    before(
        scope="AsyncLLM.__init__",
        anchor="self.logger_manager: StatLoggerManager | None = None",
        insert="""
self.capture = capture_attaching.open_for_async_engine(self)
self.steering = steering_serving.open_control(self)
self.hooks = hooks_attaching.open_for_async_engine(self)
""",
        why="The core has started, so the model's hook points are known.",
    ),
    before(
        scope="AsyncLLM.__init__",
        anchor="self._client_count = client_count",
        insert="self.capture.publish(self.logger_manager)",
        why="Metrics of capture are exported with the engine's.",
    ),
    before(
        scope="AsyncLLM.add_request",
        anchor="is_pooling = isinstance(params, PoolingParams)",
        insert="""
check_request_size(params)
params = await self.steering.prepare(params)
""",
        why="Parameters are bounded before a copy is made. Another API server may have "
        "registered a name since, and large vectors are parsed off the event loop.",
    ),
    after(
        scope="AsyncLLM._add_streaming_input_request",
        anchor="self._validate_streaming_input_sampling_params(sampling_params)",
        insert="""
self.input_processor.capture.admit(request_id, sampling_params, 1, resumable=True)
self.input_processor.steering.admit(sampling_params, 1, resumable=True)
""",
        why="Below, these parameters are used for a non-resumable request.",
    ),
    before(
        scope="AsyncLLM.generate",
        anchor="yield out",
        insert="""
if steering_refusals.is_refused(out):
    await steering_serving.raise_refusal(self, q.request_id, out, sampling_params)
if nonfinite_streams.is_nonfinite(out):
    await nonfinite_streams.raise_error(self, q.request_id, out, sampling_params)
if out.capture_id is not None:
    await self.capture.complete(out, sampling_params)
if out.hooks_key is not None and out.finished:
    await self.hooks.complete_async(out)
""",
        why="The engine may have rejected its steering. Outputs carry rows, and the "
        "last one results, for which it may wait.",
    ),
    before(
        scope="AsyncLLM.shutdown",
        anchor='if engine_core := getattr(self, "engine_core", None):',
        insert="""
if capture := getattr(self, "capture", None):
    capture.settle()
""",
        why="A request that has been answered must not lose its capture.",
    ),
    before(
        scope="AsyncLLM.shutdown",
        anchor='handler = getattr(self, "output_handler", None)',
        insert="""
if capture := getattr(self, "capture", None):
    capture.close()
""",
        why="Stops the receiving thread: the engine has stopped.",
    ),
    before(
        scope="AsyncLLM.shutdown",
        anchor="engine_core.shutdown(timeout=timeout)",
        insert="engine_core.stopping = True",
        why="Tells this stop from the engine's death.",
    ),
    replace(
        scope="AsyncLLM._run_output_handler.output_handler",
        anchor='logger.exception("AsyncLLM output_handler failed.")',
        by="engine_stop.log_end(logger, engine_core)",
        why="A stop that gives the engine time is not reported as its death.",
    ),
]

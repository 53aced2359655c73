# SPDX-License-Identifier: Apache-2.0
"""The engine core reports hook points, finishes captures and changes steering."""

from fork.language import add_argument, add_import, after, before, first, last

EDITS = [
    add_import(
        "from vllm.v1.residual import nonfinite_streams, suspect_blocks",
        why="Requests whose stream is no longer finite.",
    ),
    add_import(
        "from vllm.v1.capture.core import engine as capture_engine",
        why="Implements the calls below.",
    ),
    add_import(
        "from vllm.v1.hooks.core import engine as hooks_engine",
        why="Implements the calls below.",
    ),
    add_import(
        "from vllm.v1.readouts.core import engine as readouts_engine",
        why="Implements the calls below.",
    ),
    add_import(
        "from vllm.v1.steering.core import engine as steering_engine",
        why="Implements the calls below.",
    ),
    add_import(
        "from vllm.v1.steering.core import refusals as steering_refusals",
        why="Implements the calls below.",
    ),
    add_import(
        "from vllm.v1.steering.core import name_log as named_steering",
        why="Implements the calls below.",
    ),
    add_import(
        "from vllm.v1.steering import vector_cache as passed_vectors",
        why="Implements the calls below.",
    ),
    after(
        scope="EngineCore.__init__",
        anchor="self.model_executor = executor_class(vllm_config)",
        insert="capture_engine.note_model(self)",
        why="The model is loaded here, and admission needs its hook points.",
    ),
    last(
        scope="EngineCore",
        insert="""
end_captures = capture_engine.end_captures
introduce_capture = capture_engine.introduce_capture
take_hook_results = hooks_engine.take_hook_results
prefetch_parameters = hooks_engine.prefetch_parameters
clear_parameters = hooks_engine.clear_parameters
load_readout_module = readouts_engine.load_module
unload_readout_module = readouts_engine.unload_module
readout_status = readouts_engine.status
decoded_rows = readouts_engine.decoded_rows
unembedding_rows = readouts_engine.unembedding_rows
dynamic_steering = steering_engine.dynamic_steering
set_steering = steering_engine.set_steering
get_steering = steering_engine.get_steering
hold_steering = steering_engine.hold_steering
commit_steering = steering_engine.commit_steering
release_steering = steering_engine.release_steering
steering_names = named_steering.steering_names
change_steering_name = named_steering.change_steering_name
""",
        why="Front ends call these methods by name.",
    ),
    after(
        scope="EngineCore.shutdown",
        anchor="self.structured_output_manager.clear_backend()",
        insert="capture_engine.deliver_ends(self)",
        why="No further step would carry them to the workers.",
    ),
    first(
        scope="EngineCoreProc._reject_utility_in_shutdown",
        insert="""
if method_name == "end_captures":
    return False
""",
        why="Requests that finish while the engine drains were captured.",
    ),
    first(
        scope="EngineCoreProc.process_input_sockets",
        insert="steering_received = passed_vectors.ReceivedVectors()",
        why="Vectors that front ends have sent already.",
    ),
    before(
        scope="EngineCoreProc.process_input_sockets",
        anchor="request = self.preprocess_add_request(req)",
        insert="steering_received.complete(req)",
        why="Vectors that were sent before are sent by digest.",
    ),
    after(
        scope="EngineCoreProc._handle_client_request",
        anchor="if self._reject_add_in_shutdown(req):",
        insert="if steering_engine.refuses(self, req):\n    return",
        why="Another front end may have set global vectors that conflict with its own.",
    ),
    add_argument(
        scope="EngineCoreProc._make_ready_response",
        call="EngineCoreReadyResponse",
        argument="hook_points=self.vllm_config.capture_config.hook_points",
        why="Sends them to the front ends.",
    ),
    add_argument(
        scope="EngineCoreProc._make_ready_response",
        call="EngineCoreReadyResponse",
        argument="lens_refusal=self.vllm_config.readout_config.lens_refusal",
        why="Sends it to the front ends.",
    ),
    first(
        scope="EngineCore.collective_rpc",
        insert="steering_refusals.refuse_worker_call(method)",
        why="Names the remedy for calls that scripts of an earlier fork make.",
    ),
    after(
        scope="EngineCore._initialize_kv_caches",
        anchor="""
kv_cache_configs = get_kv_cache_configs(
    vllm_config, kv_cache_specs, available_gpu_memory
)
""",
        insert="suspect_blocks.mark(vllm_config, kv_cache_configs)",
        why="Must happen before the scheduler and the workers copy the configuration.",
    ),
    after(
        scope="EngineCore.step",
        anchor="engine_core_outputs = self.scheduler.update_from_output(...)",
        insert="nonfinite_streams.explain(self, engine_core_outputs)",
        why="The blocks of these requests have not been overwritten yet.",
    ),
    after(
        scope="EngineCore.step_with_batch_queue",
        anchor="engine_core_outputs = self.scheduler.update_from_output(...)",
        insert="nonfinite_streams.explain(self, engine_core_outputs)",
        why="The blocks of these requests have not been overwritten yet.",
    ),
]

# SPDX-License-Identifier: Apache-2.0
"""The engine core reports hook points, finishes captures and changes steering."""

from fork.language import (
    add_argument,
    add_decorator,
    add_import,
    after,
    before,
    first,
)

EDITS = [
    add_import(
        "from vllm.v1.residual.core import engine as residual_engine",
        why="The engine core's interface to the features.",
    ),
    add_decorator(
        scope="EngineCore",
        decorator="residual_engine.with_calls",
        why="Front ends call methods by name.",
    ),
    after(
        scope="EngineCore.__init__",
        anchor="self.model_executor = executor_class(vllm_config)",
        insert="self.residual = residual_engine.open_core(self)",
        why="The model is loaded here, and admission needs its hook points.",
    ),
    after(
        scope="EngineCore._initialize_kv_caches",
        anchor="kv_cache_configs = get_kv_cache_configs(...)",
        insert="self.residual.mark(vllm_config, kv_cache_configs)",
        why="Must happen before the scheduler and the workers copy the configuration.",
    ),
    *[
        after(
            scope=f"EngineCore.{scope}",
            anchor="engine_core_outputs = self.scheduler.update_from_output(...)",
            insert="self.residual.explain(self, engine_core_outputs)",
            why="The blocks of requests that NaN has ended are not overwritten yet.",
        )
        for scope in ("step", "step_with_batch_queue")
    ],
    after(
        scope="EngineCore.shutdown",
        anchor="self.structured_output_manager.clear_backend()",
        insert="self.residual.close(self)",
        why="No further step would carry the ends of captures to the workers.",
    ),
    first(
        scope="EngineCore.collective_rpc",
        insert="self.residual.note_worker_call(self, method)",
        why="Names the remedy for calls that scripts of an earlier fork make. No block "
        "of earlier weights may be found after others are loaded.",
    ),
    first(
        scope="EngineCore.add_lora",
        insert="self.residual.note_adapter(self, lora_request)",
        why="Blocks of an adapter that was loaded before must not be found.",
    ),
    first(
        scope="EngineCoreProc._reject_utility_in_shutdown",
        insert="""
if self.residual.accepts_when_stopping(method_name):
    return False
""",
        why="Requests that finish while the engine drains were captured.",
    ),
    before(
        scope="EngineCoreProc.process_input_sockets",
        anchor="request = self.preprocess_add_request(req)",
        insert="self.residual.complete(req)",
        why="Vectors that were sent before are sent by digest.",
    ),
    before(
        scope="EngineCoreProc._handle_client_request",
        anchor="self.add_request(req, request_wave)",
        insert="if self.residual.refuses(self, req):\n    return",
        why="Another front end may have set global vectors that conflict with its own.",
    ),
    add_argument(
        scope="EngineCoreProc._make_ready_response",
        call="EngineCoreReadyResponse",
        argument="residual=self.residual.facts(self.vllm_config)",
        why="Sends front ends what they must know of the model.",
    ),
]

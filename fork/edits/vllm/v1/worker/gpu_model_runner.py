# SPDX-License-Identifier: Apache-2.0
"""The V1 runner calls capture and steering in each step.

Its CUDA graphs are recorded in families with different launching taps.
"""

from fork.language import add_import, after, before, first, last, replace

EDITS = [
    add_import(
        "from vllm.v1.worker import residual_graphs, residual_open, residual_views",
        why="The runners' interface to capture and steering.",
    ),
    *[
        replace(
            scope=f"GPUModelRunner.{scope}",
            anchor="self.cudagraph_dispatcher.get_capture_descs()",
            by="residual_graphs.dispatched_families("
            "self.cudagraph_dispatcher.get_capture_descs())",
            why="Each graph of the target model is recorded once per family, and all "
            "of them need memory.",
        )
        for scope in ("profile_cudagraph_memory", "capture_model")
    ],
    first(
        scope="GPUModelRunner._warmup_and_capture",
        insert=("residual_graphs.record_family(desc.tapped, cudagraph_runtime_mode)"),
        why="While a graph is recorded its family decides whether taps launch.",
    ),
    last(
        scope="GPUModelRunner._warmup_and_capture",
        insert="residual_graphs.end_recording()",
        why="Passes outside a step launch no taps.",
    ),
    before(
        scope="GPUModelRunner._dummy_run",
        anchor="num_tokens_padded = batch_desc.num_tokens",
        insert="batch_desc = residual_graphs.as_recorded(batch_desc)",
        why="The key under which a graph is recorded and found.",
    ),
    before(
        scope="GPUModelRunner.load_model",
        anchor="self._moe_model = get_mixture_of_experts_model(self.model)",
        insert="""
self.residual = residual_open.open_residual_stream(
    self.vllm_config, self.model, self.device
)
""",
        why="Must precede compilation, inside the measurement of the model's memory.",
    ),
    after(
        scope="GPUModelRunner.execute_model",
        anchor="deferred_state_corrections_fn = self._update_states(scheduler_output)",
        insert="self.residual.update(scheduler_output)",
        why="Must precede the early return of steps without tokens.",
    ),
    after(
        scope="GPUModelRunner.execute_model",
        anchor="num_tokens_padded = batch_desc.num_tokens",
        insert="""
self.residual.plan_step(
    lambda: residual_views.v1_view(
        self.input_batch,
        num_scheduled_tokens_np,
        num_tokens_padded,
        self.num_computed_tokens if self.use_async_spec_decode else None,
    )
)
batch_desc = self.residual.dispatch_graph(cudagraph_mode, batch_desc)
self.residual.begin_step(num_tokens_padded)
""",
        why="The batch's order and padding are known; a step that captures or steers "
        "runs a graph in which taps launch.",
    ),
    before(
        scope="GPUModelRunner.execute_model",
        anchor='with record_function_or_nullcontext("gpu_model_runner: postprocess"):',
        insert="self.residual.end_step(attn_metadata)",
        why="The forward pass is queued on the device.",
    ),
    replace(
        scope="GPUModelRunner._bookkeeping_sync",
        anchor="envs.VLLM_COMPUTE_NANS_IN_LOGITS",
        by="envs.VLLM_COMPUTE_NANS_IN_LOGITS or self.residual.checks_streams",
        why="A steered request must end when its stream is no longer finite.",
    ),
    *[
        replace(
            scope="GPUModelRunner._bookkeeping_sync",
            anchor=f"{function}(logits)",
            by=f"{function}("
            "residual_views.first_rows(logits, self.input_batch, drafts) "
            "if (drafts := scheduler_output.scheduled_spec_decode_tokens) else logits)",
            why="With draft tokens a request has several rows.",
        )
        for function in ("count_nans_per_row", "self._get_nans_in_logits")
    ],
]

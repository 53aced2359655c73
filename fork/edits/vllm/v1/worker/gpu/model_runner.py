# SPDX-License-Identifier: Apache-2.0
"""The V2 runner calls capture and steering in each step."""

from fork.language import add_argument, add_import, after, before

EDITS = [
    add_import(
        "from vllm.v1.worker import residual_open, residual_views",
        why="The runners' interface to capture and steering.",
    ),
    before(
        scope="GPUModelRunner.load_model",
        anchor="if self.use_aux_hidden_state_outputs:",
        insert="""
self.residual = residual_open.open_residual_stream(
    self.vllm_config, self.model, self.device
)
""",
        why="Must precede compilation, inside the measurement of the model's memory.",
    ),
    after(
        scope="GPUModelRunner.execute_model",
        anchor="self.update_requests(scheduler_output)",
        insert="self.residual.update(scheduler_output)",
        why="Must precede the early return of steps without tokens.",
    ),
    after(
        scope="GPUModelRunner.execute_model",
        anchor="num_toks = batch_req_state.num_tokens",
        insert="""
self.residual.plan_step(
    lambda: residual_views.v2_view(self.req_states, batch_req_state)
)
""",
        why="The batch's order is known, and its graph is not yet chosen.",
    ),
    before(
        scope="GPUModelRunner.execute_model",
        anchor="if batch_desc.num_tokens == 0:",
        insert=(
            "batch_desc = self.residual.choose_graph("
            "batch_desc, self.cudagraph_manager)"
        ),
        why="A step that captures or steers runs a graph in which taps launch.",
    ),
    add_argument(
        scope="GPUModelRunner.execute_model",
        call="BatchDescriptor",
        argument="tapped=batch_desc.tapped",
        why="Piecewise graphs are found under this key.",
    ),
    before(
        scope="GPUModelRunner.execute_model",
        anchor=(
            "ubatch_slices = ubatch_state.slices if ubatch_state is not None else None"
        ),
        insert="self.residual.begin_step(input_batch.num_tokens_after_padding)",
        why="The batch's padding is known.",
    ),
    after(
        scope="GPUModelRunner.execute_model",
        anchor="self.kv_connector.finish_forward()",
        insert="self.residual.end_step(attn_metadata)",
        why="The forward pass is queued on the device.",
    ),
    before(
        scope="GPUModelRunner.sample_tokens",
        anchor="""
sampler_output, num_sampled, num_rejected = self.sample(
    hidden_states, input_batch, grammar_output
)
""",
        insert="nonfinite = self.residual.clear_nonfinite(hidden_states, input_batch)",
        why="Samplers cannot handle NaN.",
    ),
    after(
        scope="GPUModelRunner.sample_tokens",
        anchor="""
sampler_output, num_sampled, num_rejected = self.sample(
    hidden_states, input_batch, grammar_output
)
""",
        insert="""
if nonfinite is not None:
    sampler_output.num_nans = nonfinite
""",
        why="Copied to the host with the tokens, like upstream's counts of NaN.",
    ),
]

# SPDX-License-Identifier: Apache-2.0
"""The scheduler calls capture, readouts and steering in each step."""

from fork.language import add_argument, add_import, after, before, first, last

EDITS = [
    add_import(
        "from vllm.v1.residual.core.scheduler import NO_SCHEDULING, open_scheduling",
        why="The scheduler's interface to the features.",
    ),
    first(
        scope="Scheduler",
        insert="residual = NO_SCHEDULING",
        why="Schedulers that are made without their constructor work, as upstream's.",
    ),
    last(
        scope="Scheduler.__init__",
        insert="self.residual = open_scheduling(self)",
        why="The state of the features; it needs the manager of the KV cache.",
    ),
    first(
        scope="Scheduler.add_request",
        insert="self.residual.add_request(request)",
        why="Only the engine that ran a request handles its end.",
    ),
    before(
        scope="Scheduler._mamba_block_aligned_split",
        anchor="aligned_end = end // block_size * block_size",
        insert="""
max_prefill_tokens = self.residual.limit_alone(request, start, max_prefill_tokens)
""",
        why="A block whose rows never fit a step is computed in parts, or it never is.",
    ),
    after(
        scope="Scheduler.schedule",
        anchor="self.kv_cache_manager.new_step_starts()",
        insert="self.residual.new_step(self.running)",
        why="The row budget and the list of requests waiting for a slot are per step.",
    ),
    after(
        scope="Scheduler.schedule",
        anchor=(
            "num_new_tokens = min("
            "num_new_tokens, token_budget, input_budget - draft_slots)"
        ),
        insert="""
num_new_tokens = self.residual.limit(
    request, request.num_computed_tokens, num_new_tokens
)
""",
        why="A running request gets only as many tokens as its rows fit into staging.",
    ),
    after(
        scope="Scheduler.schedule",
        anchor="req_to_new_blocks[request_id] = new_blocks",
        insert="""
self.residual.scheduled(request, request.num_computed_tokens, num_new_tokens)
""",
        why="Charges a running request's rows to the budget.",
    ),
    after(
        scope="Scheduler.schedule",
        anchor="""
if (
    self.lora_config
    and request.lora_request
    and (
        len(scheduled_loras) == self.lora_config.max_loras
        and request.lora_request.lora_int_id not in scheduled_loras
    )
):
    skip_request(request_queue)
    continue
""",
        insert="""
if not self.residual.admits(request):
    skip_request(request_queue)
    continue
""",
        why="A request waits until its configuration can be loaded.",
    ),
    after(
        scope="Scheduler.schedule",
        anchor="""
if request.skip_reading_prefix_cache:
    ext_tokens, load_kv_async = 0, False
""",
        insert="""
if ext_tokens and not self.residual.may_load(
    request, block_aligned_local, ext_tokens
):
    ext_tokens, load_kv_async = 0, False
""",
        why="Tokens loaded from elsewhere are not computed, so they have no rows.",
    ),
    after(
        scope="Scheduler.schedule",
        anchor="num_new_tokens = request.num_tokens - num_computed_tokens",
        insert="""
request_token_budget = self.residual.limit(
    request, num_computed_tokens, request_token_budget
)
if request_token_budget == 0:
    break
""",
        why="A waiting request gets only as many tokens as its rows fit into staging.",
    ),
    before(
        scope="Scheduler.schedule",
        anchor="if num_computed_tokens + num_new_tokens < request.num_tokens:",
        insert="self.residual.begin(request, num_computed_tokens, num_new_tokens)",
        why="A request takes rows and its slot only when it is scheduled.",
    ),
    after(
        scope="Scheduler.schedule",
        anchor="scheduler_output = SchedulerOutput(...)",
        insert="self.residual.complete(scheduler_output)",
        why="The step carries ends of captures and changes of slots to the workers.",
    ),
    first(
        scope="Scheduler.update_from_output",
        insert="self.residual.note_step(model_runner_output)",
        why="Counts how often conditions fire, and sends actions with the next step.",
    ),
    before(
        scope="Scheduler.update_from_output",
        anchor="if output_is_stale and request.drop_stale_output:",
        insert="""
if output_is_stale and request.drop_stale_output:
    self.residual.dropped(request, model_runner_output)
""",
        why="Workers do not reduce the rows again that they have reduced in the step.",
    ),
    after(
        scope="Scheduler.update_from_output",
        anchor="status_before_stop = request.status",
        insert="""
new_token_ids = self.residual.sampled(
    request,
    model_runner_output,
    num_tokens_scheduled - len(scheduled_spec_token_ids or ()),
    new_token_ids,
)
""",
        why="A readout may end the request at a token before these.",
    ),
    before(
        scope="Scheduler.update_from_output",
        anchor="routed_experts = None",
        insert="stopped = self.residual.stops(request, stopped)",
        why="Other stop conditions at the remaining tokens take precedence.",
    ),
    add_argument(
        scope="Scheduler.update_from_output",
        call="EngineCoreOutput",
        argument="residual=self.residual.take_results(request)",
        why="Results are sent with the tokens, or with the error.",
        count=2,
    ),
    add_argument(
        scope="Scheduler.make_stats",
        call="SchedulerStats",
        argument="steering_fired=self.residual.take_fired()",
        why="The front end exports the counts.",
    ),
    first(
        scope="Scheduler._free_request",
        insert="self.residual.free(request)",
        why="Every finished or aborted request passes here, with its blocks.",
    ),
    first(
        scope="Scheduler._preempt_request",
        insert="self.residual.preempt(request)",
        why="It frees its slot for those ahead of it, and its blocks below.",
    ),
    after(
        scope="Scheduler.reset_prefix_cache",
        anchor="reset_successful = self.kv_cache_manager.reset_prefix_cache()",
        insert="""
if reset_successful:
    self.residual.reset_cache()
""",
        why="Weights may have changed by means that only the caller knows.",
    ),
    first(
        scope="Scheduler._update_request_as_session",
        insert="self.residual.continue_session(session)",
        why="Must happen before the blocks of the next part are hashed.",
    ),
]

# SPDX-License-Identifier: Apache-2.0
"""The scheduler respects staging memory and slots for steering configurations."""

from fork.language import add_argument, add_import, after, before, first, last

EDITS = [
    add_import(
        "from vllm.v1.residual.nonfinite_streams import NonFiniteStreams",
        why="Requests whose stream is no longer finite.",
    ),
    add_import(
        "from vllm.v1.residual.suspect_blocks import SuspectBlocks",
        why="Blocks that such requests may have written.",
    ),
    add_import(
        "from vllm.v1.capture.core.scheduler import "
        "capture_scheduling, loadable_tokens",
        why="The scheduler's part of capture.",
    ),
    add_import(
        "from vllm.v1.steering.core.scheduler import "
        "steering_scheduling, take_vectors_off",
        why="The scheduler's part of steering.",
    ),
    add_import(
        "from vllm.v1.steering.core.receipts import note_receipt, take_receipt",
        why="What steering has done to the tokens of a request.",
    ),
    add_import(
        "from vllm.v1.readouts.core.scheduler import ReadoutScheduling, take_parts",
        why="The scheduler's part of readouts.",
    ),
    last(
        scope="Scheduler.__init__",
        insert="""
self.readouts = ReadoutScheduling()
self.capture = capture_scheduling(self.vllm_config)
self.steering = steering_scheduling(self.vllm_config)
""",
        why="The scheduler's state for readouts, capture and steering.",
    ),
    first(
        scope="Scheduler.add_request",
        insert="self.capture.add_request(request)\nself.readouts.add_request(request)",
        why="Only the engine that ran a request handles its end.",
    ),
    after(
        scope="Scheduler.schedule",
        anchor="self.kv_cache_manager.new_step_starts()",
        insert="self.capture.new_step()\nself.steering.new_step()",
        why="The row budget and the list of requests waiting for a slot are per step.",
    ),
    after(
        scope="Scheduler.schedule",
        anchor=(
            "num_new_tokens = min("
            "num_new_tokens, token_budget, input_budget - draft_slots)"
        ),
        insert="""
if self.capture.counts:
    num_new_tokens = self.capture.limit(
        request, request.num_computed_tokens, num_new_tokens
    )
""",
        why="A running request gets only as many tokens as its rows fit into staging.",
    ),
    after(
        scope="Scheduler.schedule",
        anchor="num_new_tokens = request.num_tokens - num_computed_tokens",
        insert="""
if self.capture.counts:
    request_token_budget = self.capture.limit(
        request, num_computed_tokens, request_token_budget
    )
    if request_token_budget == 0:
        break
""",
        why="A waiting request gets only as many tokens as its rows fit into staging.",
    ),
    after(
        scope="Scheduler.schedule",
        anchor="req_to_new_blocks[request_id] = new_blocks",
        insert="""
if self.capture.counts:
    self.capture.scheduled(request, request.num_computed_tokens, num_new_tokens)
""",
        why="Charges a running request's rows to the budget.",
    ),
    before(
        scope="Scheduler.schedule",
        anchor="if num_computed_tokens + num_new_tokens < request.num_tokens:",
        insert="""
if self.capture.counts:
    self.capture.scheduled(request, num_computed_tokens, num_new_tokens)
self.capture.begins(request)
""",
        why="Charges a newly scheduled request's rows to the budget.",
    ),
    add_argument(
        scope="Scheduler.schedule",
        call="SchedulerOutput",
        argument="capture_ends=self.capture.take_ends()",
        why="The step carries requests that have finished.",
    ),
    add_argument(
        scope="Scheduler.schedule",
        call="SchedulerOutput",
        argument="capture_reforwarded=self.capture.take_reforwarded()",
        why="The worker reports it among the metrics of capture.",
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
if not self.steering.admits(request):
    skip_request(request_queue)
    continue
""",
        why="A request waits until its configuration can be loaded.",
    ),
    before(
        scope="Scheduler.schedule",
        anchor="if num_computed_tokens + num_new_tokens < request.num_tokens:",
        insert="self.steering.begin(request)",
        why="A request takes its slot only when it is scheduled.",
    ),
    before(
        scope="Scheduler.schedule",
        anchor=(
            'with record_function_or_nullcontext("schedule: make_cached_request_data"):'
        ),
        insert="take_vectors_off(new_reqs_data)",
        why="Workers receive vectors once, when the slot is loaded.",
    ),
    add_argument(
        scope="Scheduler.schedule",
        call="SchedulerOutput",
        argument="steering=self.steering.take_step()",
        why="The step carries the slots to load and the requests that use them.",
    ),
    after(
        scope="Scheduler.update_from_output",
        anchor="status_before_stop = request.status",
        insert="""
read_out = None
if model_runner_output.readouts is not None and req_id in self.readouts:
    read_out = self.readouts.take(
        request,
        model_runner_output.readouts,
        num_tokens_scheduled - len(scheduled_spec_token_ids or ()),
        new_token_ids,
    )
    new_token_ids = read_out.token_ids
if model_runner_output.receipts and req_id in model_runner_output.receipts:
    note_receipt(
        request,
        model_runner_output.receipts[req_id],
        num_tokens_scheduled - len(scheduled_spec_token_ids or ()),
        new_token_ids,
    )
""",
        why="A readout may end the request at a token before these.",
    ),
    before(
        scope="Scheduler.update_from_output",
        anchor="routed_experts = None",
        insert="""
if read_out is not None and not stopped and read_out.fired:
    request.status = RequestStatus.FINISHED_STOPPED
    request.stop_reason = read_out.fired
    stopped = True
""",
        why="Other stop conditions at the remaining tokens take precedence.",
    ),
    add_argument(
        scope="Scheduler.update_from_output",
        call="EngineCoreOutput",
        argument="readouts=take_parts(request)",
        why="Readouts are sent with the tokens, or with the error.",
        count=2,
    ),
    first(
        scope="Scheduler.update_from_output",
        insert="""
self.steering.note_fired(model_runner_output.fired)
self.steering.note_actions(model_runner_output.actions)
""",
        why="Counts how often conditions fire, and sends actions with the next step.",
    ),
    add_argument(
        scope="Scheduler.make_stats",
        call="SchedulerStats",
        argument="steering_fired=self.steering.take_fired()",
        why="The front end exports the counts.",
    ),
    add_argument(
        scope="Scheduler.update_from_output",
        call="EngineCoreOutput",
        argument="receipt=take_receipt(request)",
        why="Doses are sent with the tokens, or with the error.",
        count=2,
    ),
    first(
        scope="Scheduler._free_request",
        insert="self.readouts.forget(request)",
        why="Every finished or aborted request passes here.",
    ),
    first(
        scope="Scheduler._free_request",
        insert="self.steering.release(request)",
        why="Every finished or aborted request passes here.",
    ),
    last(
        scope="Scheduler._preempt_request",
        insert="self.steering.preempted(request)",
        why="A preempted request frees its slot for those ahead of it.",
    ),
    after(
        scope="Scheduler.schedule",
        anchor="""
if request.skip_reading_prefix_cache:
    ext_tokens, load_kv_async = 0, False
""",
        insert="""
if ext_tokens and not loadable_tokens(request, block_aligned_local, ext_tokens):
    ext_tokens, load_kv_async = 0, False
""",
        why="Tokens loaded from elsewhere are not computed, so they have no rows.",
    ),
    first(
        scope="Scheduler._update_request_as_session",
        insert="self.steering.continued(session)",
        why="Must happen before the blocks of the next part are hashed.",
    ),
    last(
        scope="Scheduler.__init__",
        insert="""
self.suspects = SuspectBlocks(
    kv_cache_config.has_mamba_layers or kv_cache_config.has_mixed_precision_kv_cache
)
self.nonfinite_streams = NonFiniteStreams(
    self.suspects, self.kv_cache_manager.get_block_ids
)
""",
        why="NaN that one request left in a block must not reach the next one.",
    ),
    after(
        scope="Scheduler.schedule",
        anchor="self.kv_cache_manager.new_step_starts()",
        insert="if self.steering.tiers:\n    self.suspects.begin_all(self.running)",
        why="Global vectors affect all running requests.",
    ),
    before(
        scope="Scheduler.schedule",
        anchor="if num_computed_tokens + num_new_tokens < request.num_tokens:",
        insert="self.suspects.begin(request, self.steering.changes_all)",
        why="Vectors and embeddings may make the request's stream overflow.",
    ),
    add_argument(
        scope="Scheduler.schedule",
        call="SchedulerOutput",
        argument="checks_streams=self.suspects.any_running",
        why="Workers check for NaN only in steps that may have some.",
    ),
    after(
        scope="Scheduler._get_new_block_ids_to_zero",
        anchor="new_block_ids_to_zero = self.kv_cache_manager.take_new_block_ids()",
        insert="""
new_block_ids_to_zero = self.suspects.to_clear(new_block_ids_to_zero)
""",
        why="Only blocks that may hold non-finite values are cleared.",
    ),
    after(
        scope="Scheduler.update_from_output",
        anchor="status_before_stop = request.status",
        insert="""
if self.nonfinite_streams.add(request, num_nans_in_logits):
    new_token_ids = []
""",
        why="A token sampled from NaN must not reach the client.",
    ),
    before(
        scope="Scheduler.update_from_output",
        anchor="routed_experts = None",
        insert="""
if self.nonfinite_streams.has(request):
    request.status = RequestStatus.FINISHED_ERROR
    request.resumable = False
    stopped = True
""",
        why="A request whose stream is not finite ends.",
    ),
    first(
        scope="Scheduler._free_request",
        insert="""
if self.suspects.concerns(request):
    self.suspects.end(
        request, self.kv_cache_manager.get_block_ids(request.request_id)
    )
""",
        why="Must happen before the request's blocks are freed.",
    ),
    first(
        scope="Scheduler._preempt_request",
        insert="""
if self.suspects.concerns(request):
    self.suspects.end(
        request, self.kv_cache_manager.get_block_ids(request.request_id)
    )
""",
        why="Must happen before the request's blocks are freed.",
    ),
]

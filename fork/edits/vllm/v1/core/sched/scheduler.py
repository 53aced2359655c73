# SPDX-License-Identifier: Apache-2.0
"""A step captures no more rows than staging memory holds."""

from fork.language import add_argument, add_import, after, before, last

EDITS = [
    add_import(
        "from vllm.v1.capture.scheduling import capture_scheduling",
        why="The scheduler's part of capture.",
    ),
    last(
        scope="Scheduler.__init__",
        insert="self.capture = capture_scheduling(self.vllm_config)",
        why="One object holds the step's budget and pending ends.",
    ),
    after(
        scope="Scheduler.schedule",
        anchor="self.kv_cache_manager.new_step_starts()",
        insert="self.capture.new_step()",
        why="The budget is per step.",
    ),
    after(
        scope="Scheduler.schedule",
        anchor=(
            "num_new_tokens = min("
            "num_new_tokens, token_budget, input_budget - draft_slots)"
        ),
        insert=(
            "num_new_tokens = self.capture.limit("
            "request, request.num_computed_tokens, num_new_tokens)"
        ),
        why="A running request gets as many tokens as its rows fit.",
    ),
    after(
        scope="Scheduler.schedule",
        anchor="num_new_tokens = request.num_tokens - num_computed_tokens",
        insert="""
request_token_budget = self.capture.limit(
    request, num_computed_tokens, request_token_budget
)
if request_token_budget == 0:
    break
""",
        why="A waiting request gets as many tokens as its rows fit.",
    ),
    after(
        scope="Scheduler.schedule",
        anchor="req_to_new_blocks[request_id] = new_blocks",
        insert=(
            "self.capture.scheduled("
            "request, request.num_computed_tokens, num_new_tokens)"
        ),
        why="A running request takes its share of the budget.",
    ),
    before(
        scope="Scheduler.schedule",
        anchor="if num_computed_tokens + num_new_tokens < request.num_tokens:",
        insert=("self.capture.scheduled(request, num_computed_tokens, num_new_tokens)"),
        why="A request that was waiting takes its share of the budget.",
    ),
    add_argument(
        scope="Scheduler.schedule",
        call="SchedulerOutput",
        argument="capture_ends=self.capture.take_ends()",
        why="The step carries ends that have come in.",
    ),
]

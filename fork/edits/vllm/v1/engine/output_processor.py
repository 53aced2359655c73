# SPDX-License-Identifier: Apache-2.0
"""The output processor detects when a request ends for its client."""

from fork.language import (
    Edit,
    add_decorator,
    add_import,
    after,
    before,
    first,
    replace,
    since,
    until,
)


def end_request(anchor: str) -> Edit:
    """The edit at the place where a request ends."""
    return before(
        scope="OutputProcessor.process_outputs",
        anchor=anchor,
        insert="self.residual.end_request(req_state, finish_reason)",
        why="Stop strings are applied here, so the final tokens are known only now.",
    )


EDITS = [
    add_import(
        """
from vllm.v1.residual.frontend import front_end as residual_front_end
""",
        why="Its interface to the features, and the results of a request.",
    ),
    first(
        scope="RequestState",
        insert="residual = residual_front_end.NO_RESULTS",
        why="Most requests have no results.",
    ),
    first(
        scope="OutputProcessor",
        insert="residual = residual_front_end.NO_FRONT_END",
        why="The engine replaces it by its own front end when it has started.",
    ),
    after(
        scope="OutputProcessor.add_request",
        anchor="self.request_states[request_id] = req_state",
        insert="self.residual.add_request(req_state, request)",
        why="Registers the request, whose results will follow.",
    ),
    after(
        scope="OutputProcessor.process_outputs",
        anchor="stop_reason = engine_core_output.stop_reason",
        insert="req_state.residual.collect(engine_core_output.residual)",
        why="Results are sent with the tokens that they belong to.",
    ),
    replace(
        scope="OutputProcessor.process_outputs",
        anchor="finish_reason == FinishReason.STOP",
        by=(
            "finish_reason == FinishReason.STOP "
            "and not residual_front_end.ended_by(stop_reason)"
        ),
        why="The token at which a readout fires is part of the text.",
    ),
    after(
        scope="RequestState.make_request_output",
        anchor="""
output = self._new_completion_output(new_token_ids, finish_reason, stop_reason)
""",
        insert="self.residual.complete(self, output, stop_reason)",
        why="Each sample has its own results; a streamed one those of its tokens.",
    ),
    add_decorator(
        scope="RequestState._new_request_output",
        decorator="residual_front_end.named",
        why="Further results are matched to the output by what it names.",
    ),
    *until("0.33.0", end_request("self._finish_request(req_state)")),
    *since(
        "0.33.0",
        end_request("if req_state.streaming_input or not engine_core_output.finished:"),
        before(
            scope="OutputProcessor.process_outputs",
            anchor="if req_state.streaming_input:",
            insert='self.residual.end_request(req_state, "error")',
            why="A paused engine rejects the request on its arrival.",
        ),
    ),
    before(
        scope="OutputProcessor.abort_requests",
        anchor="self.lora_states.request_finished(request_id, req_state.lora_name)",
        insert='self.residual.end_request(req_state, "abort")',
        why="An aborted request ends with the tokens that its client has received.",
    ),
    *[
        before(
            scope=f"OutputProcessor.{scope}",
            anchor=anchor,
            insert="self.residual.flush()",
            why="Sends one message to the engine for all requests that have ended.",
        )
        for scope, anchor in (
            ("process_outputs", "return OutputProcessorOutput(...)"),
            ("abort_requests", "return request_ids_to_abort"),
        )
    ],
]

# SPDX-License-Identifier: Apache-2.0
"""The output processor knows when a request ends for its client."""

from fork.language import add_argument, add_import, after, before, last, replace

EDITS = [
    add_import(
        "from vllm.v1.capture.frontend.disabled import NO_CAPTURE",
        why="The front end of capture, when there is none.",
    ),
    add_import(
        "from vllm.v1.readouts.frontend import collector as readout_collector",
        why="What a request has read out.",
    ),
    last(
        scope="RequestState.__init__",
        insert="self.readouts: readout_collector.Collector | None = None",
        why="Set when the request reads out.",
    ),
    after(
        scope="OutputProcessor.add_request",
        anchor="self.request_states[request_id] = req_state",
        insert="""
req_state.readouts = readout_collector.collector_for(request.sampling_params)
""",
        why="Results of this request are expected from now on.",
    ),
    after(
        scope="OutputProcessor.process_outputs",
        anchor="stop_reason = engine_core_output.stop_reason",
        insert="readout_collector.collect(req_state, engine_core_output)",
        why="Results come with the tokens that they belong to.",
    ),
    replace(
        scope="OutputProcessor.process_outputs",
        anchor="finish_reason == FinishReason.STOP",
        by=(
            "finish_reason == FinishReason.STOP "
            "and not readout_collector.ended_by(stop_reason)"
        ),
        why="The token at which a readout fires is part of the text.",
    ),
    after(
        scope="RequestState._new_completion_output",
        anchor="delta = self.output_kind == RequestOutputKind.DELTA",
        insert="""
readouts = None
if self.readouts is not None:
    readouts = self.readouts.results(
        self.detokenizer.num_output_tokens(),
        delta,
        finished,
        readout_collector.ended_by(stop_reason),
    )
""",
        why="An output in parts carries the results for its tokens.",
    ),
    add_argument(
        scope="RequestState._new_completion_output",
        call="CompletionOutput",
        argument="readouts=readouts",
        why="Each sample has its own.",
    ),
    last(
        scope="OutputProcessor.__init__",
        insert="self.capture = NO_CAPTURE",
        why="The engine puts its own front end here once it is up.",
    ),
    last(
        scope="RequestState.__init__",
        insert="self.capture_id: str | None = None",
        why="Set when the request is captured.",
    ),
    add_argument(
        scope="RequestState._new_request_output",
        call="RequestOutput",
        argument="capture_id=self.capture_id",
        why="The output can be given results and rows.",
    ),
    after(
        scope="OutputProcessor.add_request",
        anchor="self.request_states[request_id] = req_state",
        insert="self.capture.add_request(req_state, request.sampling_params)",
        why="Results of this request are expected from now on.",
    ),
    before(
        scope="OutputProcessor.process_outputs",
        anchor="self._finish_request(req_state)",
        insert="self.capture.end_request(req_state, str(finish_reason))",
        why="Only here it is known which generated tokens count: stop strings.",
    ),
    before(
        scope="OutputProcessor.process_outputs",
        anchor="return OutputProcessorOutput(...)",
        insert="self.capture.flush()",
        why="One message to the engine for all requests that ended.",
    ),
    before(
        scope="OutputProcessor.abort_requests",
        anchor="self.lora_states.request_finished(request_id, req_state.lora_name)",
        insert='self.capture.end_request(req_state, "abort")',
        why="An aborted request ends with the tokens its client has.",
    ),
    before(
        scope="OutputProcessor.abort_requests",
        anchor="return request_ids_to_abort",
        insert="self.capture.flush()",
        why="Tells the engine of captures that were aborted.",
    ),
]

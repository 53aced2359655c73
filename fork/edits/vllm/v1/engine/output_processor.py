# SPDX-License-Identifier: Apache-2.0
"""The output processor detects when a request ends for its client."""

from fork.language import add_argument, add_import, after, before, last, replace

EDITS = [
    add_import(
        "from vllm.v1.capture.frontend.disabled import NO_CAPTURE",
        why="The null object for capture.",
    ),
    add_import(
        "from vllm.v1.readouts.frontend import collector as readout_collector",
        why="Collects the readouts of a request.",
    ),
    last(
        scope="RequestState.__init__",
        insert="self.readouts: readout_collector.Collector | None = None",
        why="Set if the request has readouts.",
    ),
    after(
        scope="OutputProcessor.add_request",
        anchor="self.request_states[request_id] = req_state",
        insert="""
req_state.readouts = readout_collector.collector_for(request.sampling_params)
""",
        why="Registers the request, whose results will follow.",
    ),
    add_import(
        "from vllm.v1.steering.frontend import receipts as steering_receipts",
        why="Collects what steering has done to a request.",
    ),
    add_import(
        "from vllm.v1.steering.receipts import Receipt as SteeringReceipt",
        why="The type of the attribute.",
    ),
    last(
        scope="RequestState.__init__",
        insert="self.receipt: SteeringReceipt | None = None",
        why="Set if the request asked for a receipt.",
    ),
    after(
        scope="OutputProcessor.add_request",
        anchor="self.request_states[request_id] = req_state",
        insert="""
req_state.receipt = steering_receipts.receipt_for(request, req_state.prompt_len)
""",
        why="Registers the request, whose doses will follow.",
    ),
    after(
        scope="OutputProcessor.process_outputs",
        anchor="stop_reason = engine_core_output.stop_reason",
        insert="steering_receipts.collect(req_state, engine_core_output)",
        why="Doses are sent with the tokens that they belong to.",
    ),
    add_argument(
        scope="RequestState._new_completion_output",
        call="CompletionOutput",
        argument=(
            "steering=steering_receipts.finished_receipt("
            "self, finished, readout_collector.ended_by(stop_reason))"
        ),
        why="Each sample has its own receipt.",
    ),
    last(
        scope="RequestState.__init__",
        insert="self.hooks_key: str | None = None",
        why="Set if functions run for the request.",
    ),
    after(
        scope="OutputProcessor.add_request",
        anchor="self.request_states[request_id] = req_state",
        insert="""
if request.sampling_params is not None and request.sampling_params._hooks is not None:
    req_state.hooks_key = request.sampling_params._hooks.key
""",
        why="Names what the functions save.",
    ),
    add_argument(
        scope="RequestState._new_request_output",
        call="RequestOutput",
        argument="hooks_key=self.hooks_key",
        why="What the functions saved is taken for the final output.",
    ),
    after(
        scope="OutputProcessor.process_outputs",
        anchor="stop_reason = engine_core_output.stop_reason",
        insert="readout_collector.collect(req_state, engine_core_output)",
        why="Results are sent with the tokens that they belong to.",
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
        why="A streamed output carries the results for its tokens.",
    ),
    add_argument(
        scope="RequestState._new_completion_output",
        call="CompletionOutput",
        argument="readouts=readouts",
        why="Each sample has its own results.",
    ),
    last(
        scope="OutputProcessor.__init__",
        insert="self.capture = NO_CAPTURE",
        why="The engine replaces it by its own front end when it has started.",
    ),
    last(
        scope="RequestState.__init__",
        insert="self.capture_id: str | None = None",
        why="Set if the request is captured.",
    ),
    add_argument(
        scope="RequestState._new_request_output",
        call="RequestOutput",
        argument="capture_id=self.capture_id",
        why="Results and rows are matched to the output by it.",
    ),
    after(
        scope="OutputProcessor.add_request",
        anchor="self.request_states[request_id] = req_state",
        insert="self.capture.add_request(req_state, request.sampling_params)",
        why="Registers the request, whose results will follow.",
    ),
    before(
        scope="OutputProcessor.process_outputs",
        anchor="self._finish_request(req_state)",
        insert="self.capture.end_request(req_state, str(finish_reason))",
        why="Stop strings are applied here, so the final tokens are known only now.",
    ),
    before(
        scope="OutputProcessor.process_outputs",
        anchor="return OutputProcessorOutput(...)",
        insert="self.capture.flush()",
        why="Sends one message to the engine for all requests that have ended.",
    ),
    before(
        scope="OutputProcessor.abort_requests",
        anchor="self.lora_states.request_finished(request_id, req_state.lora_name)",
        insert='self.capture.end_request(req_state, "abort")',
        why="An aborted request ends with the tokens that its client has received.",
    ),
    before(
        scope="OutputProcessor.abort_requests",
        anchor="return request_ids_to_abort",
        insert="self.capture.flush()",
        why="Informs the engine about aborted captures.",
    ),
]

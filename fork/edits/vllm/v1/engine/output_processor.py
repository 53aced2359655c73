# SPDX-License-Identifier: Apache-2.0
"""The output processor knows when a request ends for its client."""

from fork.language import add_argument, add_import, after, before, last

EDITS = [
    add_import(
        "from vllm.v1.capture.frontend.disabled import NO_CAPTURE",
        why="The front end of capture, when there is none.",
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

# SPDX-License-Identifier: Apache-2.0
"""Completion responses carry the results of captures and readouts."""

from fork.language import add_argument, add_import, before, replace

EDITS = [
    add_import(
        "from vllm.entrypoints.serve.utils import stream_errors",
        why="Logs errors of streams.",
    ),
    add_import(
        "from vllm.entrypoints.serve.capture import answers as capture_answers",
        why="Encodes rows off the event loop.",
    ),
    add_import(
        "from vllm.v1.capture.frontend import http as capture_http",
        why="Results as JSON.",
    ),
    add_import(
        "from vllm.interop.vllm_lens import responses as lens_responses",
        why="Rows in the format of vllm-lens.",
    ),
    add_argument(
        scope="OpenAIServingCompletion.request_output_to_completion_response",
        call="CompletionResponse",
        argument="activations=lens_responses.response_activations(final_res_batch)",
        why="Must precede the capture results, which then omit these rows.",
    ),
    add_argument(
        scope="OpenAIServingCompletion.request_output_to_completion_response",
        call="CompletionResponse",
        argument="hook_results=lens_responses.response_hook_results(final_res_batch)",
        why="What the request's hook functions saved.",
    ),
    add_import(
        "from vllm.v1.readouts.frontend import http as readouts_http",
        why="Results as JSON.",
    ),
    add_import(
        "from vllm.v1.steering.frontend import receipts as steering_receipts",
        why="What steering has done.",
    ),
    add_argument(
        scope="OpenAIServingCompletion.request_output_to_completion_response",
        call="CompletionResponse",
        argument="capture_results=capture_http.response_results(final_res_batch)",
        why="The response carries the results.",
    ),
    add_argument(
        scope="OpenAIServingCompletion.request_output_to_completion_response",
        call="CompletionResponse",
        argument="readouts=readouts_http.response_readouts(final_res_batch)",
        why="The response carries the readouts.",
    ),
    add_argument(
        scope="OpenAIServingCompletion.request_output_to_completion_response",
        call="CompletionResponse",
        argument="steering=steering_receipts.response_receipts(final_res_batch)",
        why="The response says what steering has done.",
    ),
    before(
        scope="OpenAIServingCompletion.completion_stream_generator",
        anchor="response_json = chunk.model_dump_json(exclude_unset=True)",
        insert="""
lens_responses.detach(res)
capture_http.stamp(chunk, res, output)
readouts_http.stamp(chunk, output)
steering_receipts.stamp(chunk, output)
if capture_answers.carries_rows(chunk):
    async for piece in capture_answers.event(chunk, exclude_unset=True):
        yield piece
    continue
""",
        why="Every chunk carries its readouts, and the last one the capture results.",
    ),
    before(
        scope="OpenAIServingCompletion.completion_stream_generator",
        anchor="request_metadata.final_usage_info = final_usage_info",
        insert="""
for event in lens_responses.last_chunks(res):
    yield event
""",
        why="A stream carries these rows in a separate chunk before its end.",
    ),
    replace(
        scope="OpenAIServingCompletion.completion_stream_generator",
        anchor='logger.exception("Error in completion stream generator.")',
        by='stream_errors.log(logger, "Error in completion stream generator.", e)',
        why="An invalid request is no fault of the server and has no traceback.",
    ),
]

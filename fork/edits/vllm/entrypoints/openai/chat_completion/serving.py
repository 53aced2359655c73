# SPDX-License-Identifier: Apache-2.0
"""Chat responses carry the results of captures and readouts."""

from fork.language import add_argument, add_import, after, before, replace

USAGE = """
if include_continuous_usage:
    completion_tokens = previous_num_tokens[i]
    chunk.usage = UsageInfo(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=num_prompt_tokens + completion_tokens,
        completion_tokens_details=(
            _make_completion_tokens_details(previous_reasoning_tokens[i])
            if self._include_reasoning_tokens_details
            else None
        ),
    )
"""

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
        scope="OpenAIServingChat.chat_completion_full_generator",
        call="ChatCompletionResponse",
        argument="activations=lens_responses.response_activations([final_res])",
        why="Must precede the capture results, which then omit these rows.",
    ),
    add_argument(
        scope="OpenAIServingChat.chat_completion_full_generator",
        call="ChatCompletionResponse",
        argument="hook_results=lens_responses.response_hook_results([final_res])",
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
        scope="OpenAIServingChat.chat_completion_full_generator",
        call="ChatCompletionResponse",
        argument="capture_results=capture_http.response_results([final_res])",
        why="The response carries the results.",
    ),
    add_argument(
        scope="OpenAIServingChat.chat_completion_full_generator",
        call="ChatCompletionResponse",
        argument="readouts=readouts_http.response_readouts([final_res])",
        why="The response carries the readouts.",
    ),
    add_argument(
        scope="OpenAIServingChat.chat_completion_full_generator",
        call="ChatCompletionResponse",
        argument="steering=steering_receipts.response_receipts([final_res])",
        why="The response says what steering has done.",
    ),
    before(
        scope="OpenAIServingChat.chat_completion_stream_generator",
        anchor="""
if (
    not include_usage
    and self.system_fingerprint is not None
    and choice_data.finish_reason is not None
):
""",
        insert="""
lens_responses.detach(res)
capture_http.stamp(chunk, res, output)
readouts_http.stamp(chunk, output)
steering_receipts.stamp(chunk, output)
""",
        why="Every chunk carries its readouts, and the last one the capture results.",
    ),
    after(
        scope="OpenAIServingChat.chat_completion_stream_generator",
        anchor=USAGE,
        insert="""
if capture_answers.carries_rows(chunk):
    async for piece in capture_answers.event(chunk, exclude_unset=True):
        yield piece
    continue
""",
        why="Rows are encoded off the event loop and sent in pieces.",
    ),
    before(
        scope="OpenAIServingChat.chat_completion_stream_generator",
        anchor="num_completion_tokens = sum(previous_num_tokens)",
        insert="""
for event in lens_responses.last_chunks(res):
    yield event
""",
        why="A stream carries these rows in a separate chunk before its end.",
    ),
    replace(
        scope="OpenAIServingChat.chat_completion_stream_generator",
        anchor='logger.exception("Error in chat completion stream generator.")',
        by='stream_errors.log(logger, "Error in chat completion stream generator.", e)',
        why="An invalid request is no fault of the server and has no traceback.",
    ),
]

# SPDX-License-Identifier: Apache-2.0
"""Chat responses carry the results of captures and readouts."""

from fork.language import add_argument, add_import, after, before

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
        "from vllm.entrypoints.serve.capture import answers as capture_answers",
        why="Encodes rows off the event loop.",
    ),
    add_import(
        "from vllm.v1.capture.frontend import http as capture_http",
        why="Results as JSON.",
    ),
    add_import(
        "from vllm.v1.readouts.frontend import http as readouts_http",
        why="Results as JSON.",
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
        why="The response carries what was read out.",
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
capture_http.stamp(chunk, res, output)
readouts_http.stamp(chunk, output)
""",
        why="The last chunk of a stream carries results, each one readouts.",
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
        why="Rows are encoded and sent piece by piece.",
    ),
]

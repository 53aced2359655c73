# SPDX-License-Identifier: Apache-2.0
"""Chat responses carry the results of captures and readouts."""

from fork.language import Edit, add_import, after, before, replace, since, until

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

SEND_ROWS = """
if residual_responses.carries_rows(chunk):
    async for piece in residual_responses.event(chunk, exclude_unset=True):
        yield piece
    continue
"""


def in_stream(scope: str, end: str) -> list[Edit]:
    """The edits of the generator that makes a stream's chunks."""
    return [
        before(
            scope=scope,
            anchor="""
if (
    not include_usage
    and self.system_fingerprint is not None
    and choice_data.finish_reason is not None
):
""",
            insert="residual_responses.stamp(chunk, res, output)",
            why="Every chunk carries its readouts, the last one the capture results.",
        ),
        before(
            scope=scope,
            anchor=end,
            insert="""
for event in residual_responses.last_chunks(res):
    yield event
""",
            why="A stream carries these rows in a separate chunk before its end.",
        ),
        replace(
            scope=scope,
            anchor='logger.exception("Error in chat completion stream generator.")',
            by="residual_responses.log_error("
            'logger, "Error in chat completion stream generator.", e)',
            why="An invalid request is no fault of the server and has no traceback.",
        ),
    ]


EDITS = [
    add_import(
        "from vllm.entrypoints.serve.utils import responses as residual_responses",
        why="What the features add to responses.",
    ),
    after(
        scope="OpenAIServingChat.chat_completion_full_generator",
        anchor="response = ChatCompletionResponse(...)",
        insert="residual_responses.complete(response, [final_res])",
        why="The response carries the results.",
    ),
    *until(
        "0.33.0",
        *in_stream(
            "OpenAIServingChat.chat_completion_stream_generator",
            "num_completion_tokens = sum(previous_num_tokens)",
        ),
        after(
            scope="OpenAIServingChat.chat_completion_stream_generator",
            anchor=USAGE,
            insert=SEND_ROWS,
            why="Rows are encoded off the event loop and sent in pieces.",
        ),
    ),
    *since(
        "0.33.0",
        *in_stream(
            "OpenAIServingChat.chat_completion_stream_generator_raw",
            "num_completion_tokens = sum(p.num_output_tokens for p in processors)",
        ),
        before(
            scope="OpenAIServingChat.chat_completion_stream_generator",
            anchor="if isinstance(chunk, ErrorResponse):",
            insert=f"""
if isinstance(chunk, str):
    yield chunk
    continue
if isinstance(chunk, ChatCompletionStreamResponse):
    {SEND_ROWS.strip().replace(chr(10), chr(10) + "    ")}
""",
            why="Rows are encoded off the event loop and sent in pieces.",
        ),
    ),
]

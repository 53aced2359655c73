# SPDX-License-Identifier: Apache-2.0
"""Completion responses carry the results of captures and readouts."""

from fork.language import add_import, after, before, replace

EDITS = [
    add_import(
        "from vllm.entrypoints.serve.utils import responses as residual_responses",
        why="What the features add to responses.",
    ),
    after(
        scope="OpenAIServingCompletion._create_completion",
        anchor="response = self.request_output_to_completion_response(...)",
        insert="residual_responses.complete(response, final_res_batch_checked)",
        why="The response carries the results.",
    ),
    before(
        scope="OpenAIServingCompletion.completion_stream_generator",
        anchor="response_json = chunk.model_dump_json(exclude_unset=True)",
        insert="""
residual_responses.stamp(chunk, res, output)
if residual_responses.carries_rows(chunk):
    async for piece in residual_responses.event(chunk, exclude_unset=True):
        yield piece
    continue
""",
        why="Every chunk carries its readouts, and the last one the capture results.",
    ),
    before(
        scope="OpenAIServingCompletion.completion_stream_generator",
        anchor="request_metadata.final_usage_info = final_usage_info",
        insert="""
for event in residual_responses.last_chunks(res):
    yield event
""",
        why="A stream carries these rows in a separate chunk before its end.",
    ),
    replace(
        scope="OpenAIServingCompletion.completion_stream_generator",
        anchor='logger.exception("Error in completion stream generator.")',
        by="residual_responses.log_error("
        'logger, "Error in completion stream generator.", e)',
        why="An invalid request is no fault of the server and has no traceback.",
    ),
]

# SPDX-License-Identifier: Apache-2.0
"""Responses with captured rows are not encoded on the event loop."""

from fork.language import add_import, before

EDITS = [
    add_import(
        "from vllm.entrypoints.serve.capture import answers as capture_answers",
        why="Builds these responses.",
    ),
    before(
        scope="create_chat_completion",
        anchor="if isinstance(generator, ErrorResponse):",
        insert="""
if isinstance(
    generator, ChatCompletionResponse
) and capture_answers.carries_rows(generator):
    return await capture_answers.answer(
        generator, raw_request, metrics_header(metrics_header_format)
    )
""",
        why="Rows are sent in pieces, in the format that the client accepts.",
    ),
]

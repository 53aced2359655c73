# SPDX-License-Identifier: Apache-2.0
"""Responses to token-in requests carry captures, readouts and receipts."""

from fork.language import add_import, before

EDITS = [
    add_import(
        "from vllm.entrypoints.serve.utils import responses as residual_responses",
        why="What the features add to responses.",
    ),
    before(
        scope="ServingTokens.serve_tokens_full_generator",
        anchor="return response",
        insert="residual_responses.complete(response, [final_res])",
        why="The response carries the results.",
    ),
    before(
        scope="ServingTokens.serve_tokens_stream_generator",
        anchor='yield f"data: {chunk.model_dump_json(exclude=exclude)}\\n\\n"',
        insert="""
residual_responses.stamp(chunk, res, output)
exclude |= residual_responses.unset(chunk)
if residual_responses.carries_rows(chunk):
    async for piece in residual_responses.event(chunk, exclude=exclude):
        yield piece
    continue
""",
        why="The last chunk of a stream carries the results.",
    ),
]

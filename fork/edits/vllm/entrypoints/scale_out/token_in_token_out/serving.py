# SPDX-License-Identifier: Apache-2.0
"""Responses to token-in requests carry captures, readouts and receipts."""

from fork.language import add_import, before

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
    add_import(
        "from vllm.v1.steering.frontend import receipts as steering_receipts",
        why="What steering has done.",
    ),
    before(
        scope="ServingTokens.serve_tokens_full_generator",
        anchor="return response",
        insert="""
response.capture_results = capture_http.response_results([final_res])
response.readouts = readouts_http.response_readouts([final_res])
response.steering = steering_receipts.response_receipts([final_res])
""",
        why="The response carries the results.",
    ),
    before(
        scope="ServingTokens.serve_tokens_stream_generator",
        anchor='yield f"data: {chunk.model_dump_json(exclude=exclude)}\\n\\n"',
        insert="""
capture_http.stamp(chunk, res, output)
readouts_http.stamp(chunk, output)
steering_receipts.stamp(chunk, output)
exclude.update(
    name for name in ("readouts", "steering") if name not in chunk.model_fields_set
)
if chunk.capture_results is None:
    exclude.add("capture_results")
elif capture_answers.carries_rows(chunk):
    async for piece in capture_answers.event(chunk, exclude=exclude):
        yield piece
    continue
""",
        why="The last chunk of a stream carries the results.",
    ),
]

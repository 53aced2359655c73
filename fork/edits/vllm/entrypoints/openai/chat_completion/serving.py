# SPDX-License-Identifier: Apache-2.0
"""Chat responses carry the results of captures and readouts."""

from fork.language import add_argument, add_import, before

EDITS = [
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
]

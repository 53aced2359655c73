# SPDX-License-Identifier: Apache-2.0
"""Chat responses carry the results of captures."""

from fork.language import add_argument, add_import, before

EDITS = [
    add_import(
        "from vllm.v1.capture.frontend import http as capture_http",
        why="Results as JSON.",
    ),
    add_argument(
        scope="OpenAIServingChat.chat_completion_full_generator",
        call="ChatCompletionResponse",
        argument="capture_results=capture_http.response_results([final_res])",
        why="The response carries the results.",
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
        insert="capture_http.stamp(chunk, res, output)",
        why="The last chunk of a stream carries the results.",
    ),
]

# SPDX-License-Identifier: Apache-2.0
"""Responses to batches of conversations carry their receipts of steering."""

from fork.language import add_argument, add_import

EDITS = [
    add_import(
        "from vllm.v1.steering.frontend import receipts as steering_receipts",
        why="What steering has done.",
    ),
    add_argument(
        scope="OpenAIServingChatBatch.chat_completion_full_generator_batch",
        call="ChatCompletionResponse",
        argument="steering=steering_receipts.response_receipts("
        "[final_results[index] for index in range(len(generators))])",
        why="The response says what steering has done, by conversation.",
    ),
]

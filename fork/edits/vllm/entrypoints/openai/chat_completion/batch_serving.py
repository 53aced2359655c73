# SPDX-License-Identifier: Apache-2.0
"""Responses to batches of conversations carry their receipts of steering."""

from fork.language import add_argument, add_import

EDITS = [
    add_import(
        "from vllm.entrypoints.serve.utils import responses as residual_responses",
        why="What the features add to responses.",
    ),
    add_argument(
        scope="OpenAIServingChatBatch.chat_completion_full_generator_batch",
        call="ChatCompletionResponse",
        argument="steering=residual_responses.response_receipts("
        "[final_results[index] for index in range(len(generators))])",
        why="The response says what steering has done, by conversation.",
    ),
]

# SPDX-License-Identifier: Apache-2.0
"""The engine core sends each front end the model's hook points, and readouts."""

from fork.language import add_field, add_import

EDITS = [
    add_import(
        "from vllm.v1.residual.core.messages import ModelFacts, RequestResults",
        why="The types of the fields.",
    ),
    add_field(
        scope="EngineCoreOutput",
        after="prompt_token_id_logprobs",
        insert="residual: RequestResults | None = None",
        why="Results are sent with the tokens that they belong to.",
    ),
    add_field(
        scope="EngineCoreReadyResponse",
        after="effective_attention_block_size",
        insert="residual: ModelFacts = ModelFacts()",
        why="Admission needs them, but the model is loaded in another process.",
    ),
]

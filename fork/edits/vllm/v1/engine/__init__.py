# SPDX-License-Identifier: Apache-2.0
"""The engine core sends each front end the model's hook points, and readouts."""

from fork.language import add_field, add_import

EDITS = [
    add_import(
        "from vllm.v1.residual.readout_plan import ReadoutPart",
        why="The type of the field.",
    ),
    add_import(
        "from vllm.v1.steering.receipts import ReceiptPart",
        why="The type of the field.",
    ),
    add_field(
        scope="EngineCoreOutput",
        after="prompt_token_id_logprobs",
        insert="readouts: list[ReadoutPart] | None = None\n"
        "receipt: list[ReceiptPart] | None = None",
        why="Results are sent with the tokens that they belong to.",
    ),
    add_field(
        scope="EngineCoreReadyResponse",
        after="effective_attention_block_size",
        insert="hook_points: dict[int, list[str]] | None = None",
        why="Admission needs them, but the model is loaded in another process.",
    ),
    add_field(
        scope="EngineCoreReadyResponse",
        after="effective_attention_block_size",
        insert='lens_refusal: str = ""',
        why="Admission refuses lenses on a model whose head does not support them.",
    ),
]

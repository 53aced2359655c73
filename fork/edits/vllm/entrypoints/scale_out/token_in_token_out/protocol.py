# SPDX-License-Identifier: Apache-2.0
"""Token-in requests have our fields in their sampling parameters."""

from fork.language import add_field, add_import, last
from fork.request_fields import RESULTS

EDITS = [
    add_import(
        "from vllm.entrypoints.serve.utils.residual_fields import refusing",
        why="Rejects unsupported fields.",
    ),
    last(
        scope="GenerateRequest",
        insert="_refuse_ours = refusing()",
        why="A field must not be silently ignored.",
    ),
    add_field(
        scope="GenerateResponseBase",
        after="ec_transfer_params",
        insert=RESULTS,
        why="The response carries the results.",
    ),
    add_field(
        scope="GenerateStreamResponseBase",
        after="metrics",
        insert=RESULTS,
        why="The last chunk of a stream carries the results.",
    ),
]

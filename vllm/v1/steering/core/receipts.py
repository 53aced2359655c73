# SPDX-License-Identifier: Apache-2.0
"""The scheduler's part of receipts: which tokens count.

A token counts once. Draft tokens that were rejected do not, nor does what a preempted
request computes again; tokens after the end are left out in the front end.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.v1.residual.receipts import ReceiptPart, StepReceipt

if TYPE_CHECKING:
    from vllm.v1.request import Request

_PARTS, _NEXT = "receipt_parts", "receipt_next"


def note_receipt(
    request: "Request",
    found: StepReceipt,
    num_tokens: int,
    new_token_ids: Sequence[int],
) -> None:
    """Keep a step's doses until the request's next output.

    Args:
        request: before the new tokens are appended to it.
        found: the step's doses.
        num_tokens: the request's tokens in the step, without draft tokens.
        new_token_ids: the tokens that the step sampled; empty while the prompt is still
            being computed.

    """
    state = vars(request)
    shift, stop = 0, max(part.stop for part in found.parts)
    if new_token_ids:
        # With draft tokens a step is prepared before it is known how many drafts of the
        # previous one were rejected; the request has the accepted ones.
        shift = request.num_tokens - num_tokens - found.start
        stop = request.num_tokens + len(new_token_ids) - 1
    least = state.get(_NEXT, 0)
    for part in found.parts:
        part.start += shift
        kept = part.between(least, stop)
        if kept is not None:
            state.setdefault(_PARTS, []).append(kept)
    state[_NEXT] = max(least, stop)


def take_receipt(request: "Request") -> list[ReceiptPart] | None:
    """Remove and return the doses that no output has carried yet."""
    return vars(request).pop(_PARTS, None) or None

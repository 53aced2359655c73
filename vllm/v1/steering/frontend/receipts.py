# SPDX-License-Identifier: Apache-2.0
"""Receipts of requests, and in HTTP responses."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.residual.choices import by_choice
from vllm.v1.steering.receipts import Receipt

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.sampling_params import SamplingParams


def receipt_for(params: "SamplingParams", num_prompt: int) -> Receipt | None:
    """The object that sums up a request's doses; None if it requested no receipt."""
    tiers = params._steering
    return Receipt(num_prompt) if tiers is not None and tiers.receipt else None


def response_receipts(
    outputs: Sequence["RequestOutput | None"],
) -> dict[str, Any] | None:
    """The `steering` field of a response to one or several prompts.

    With several choices, receipts are keyed by the choice's index as a string.
    """
    found: dict[str, Any] | None = by_choice(outputs, lambda sample: sample.steering)
    return found


def stamp(chunk: Any, part: "CompletionOutput") -> None:
    """Set the `steering` field of a choice's last streamed chunk."""
    if part.steering is not None:
        chunk.steering = part.steering

# SPDX-License-Identifier: Apache-2.0
"""Receipts in the output processor, and in HTTP responses."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.residual.choices import by_choice
from vllm.v1.steering.receipts import Receipt

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
    from vllm.v1.engine.output_processor import RequestState


def receipt_for(request: "EngineCoreRequest", num_prompt: int) -> Receipt | None:
    """The object that sums up a request's doses; None if it requested no receipt."""
    params = request.sampling_params
    tiers = None if params is None else params._steering
    return Receipt(num_prompt) if tiers is not None and tiers.receipt else None


def collect(state: "RequestState", output: "EngineCoreOutput") -> None:
    """Add the doses that came with an output of the engine core."""
    results = output.residual
    if results is not None and results.receipt and state.receipt is not None:
        state.receipt.add(results.receipt)


def finished_receipt(
    state: "RequestState", finished: bool, fired: bool
) -> dict[str, Any] | None:
    """The receipt for the last output of a sample; None before, or without one.

    Args:
        state: of the sample.
        finished: whether this is its last output.
        fired: whether a readout ended the request, whose last token has then been
            computed.

    """
    if state.receipt is None or state.detokenizer is None or not finished:
        return None
    num_tokens = state.detokenizer.num_output_tokens()
    # The last token is not fed to the model.
    fed = num_tokens if fired else max(num_tokens - 1, 0)
    return state.receipt.as_dict(state.prompt_len + fed)


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

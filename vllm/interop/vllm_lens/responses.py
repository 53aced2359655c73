# SPDX-License-Identifier: Apache-2.0
"""The field `activations` of outputs and of HTTP responses."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from vllm.interop.vllm_lens import tensors
from vllm.interop.vllm_lens.requests import INSTANCE

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

RESIDUAL_STREAM = "residual_stream"


def activations_of(output: "RequestOutput") -> dict[str, torch.Tensor] | None:
    """`{"residual_stream": [layers ascending, P+N-1, hidden_size]}`, or None.

    None if the request did not ask, or rows are missing: `capture_results` has the
    reason. For several samples, those of the first.
    """
    result = output.lens_result or (output.capture_results or {}).get(INSTANCE)
    if result is None or result.status not in ("ok", "partial_error"):
        return None
    payload = result.payload
    if isinstance(payload, Mapping) and 0 in payload:
        payload = payload[0]
    if not payload:
        return None
    # The input rows of a layer are the output of the one before.
    by_layer = {
        layer - (hook == "pre_attn"): rows for (layer, hook), rows in payload.items()
    }
    return {RESIDUAL_STREAM: torch.stack([by_layer[at] for at in sorted(by_layer)])}


def detach(output: "RequestOutput | None") -> None:
    """Remove the rows from `capture_results`, because `activations` has them."""
    if output is not None and output.capture_results:
        result = output.capture_results.pop(INSTANCE, None)
        output.lens_result = result or output.lens_result


def response_activations(
    outputs: Sequence["RequestOutput | None"],
) -> dict[str, Any] | None:
    """The field `activations` of a response; for several prompts, the first one's.

    Must be called before the response's `capture_results` are created.
    """
    for output in outputs:
        detach(output)
    found = next((o for o in outputs if o is not None), None)
    activations = None if found is None else activations_of(found)
    if activations is None:
        return None
    return {name: tensors.encode(tensor) for name, tensor in activations.items()}


def last_chunks(output: "RequestOutput | None") -> list[str]:
    """The events of a stream before `[DONE]`: one with activations, or none."""
    activations = response_activations([output])
    return [] if activations is None else [_event({"activations": activations})]


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"

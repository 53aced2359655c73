# SPDX-License-Identifier: Apache-2.0
"""The field `activations` of outputs and of HTTP responses."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from vllm.interop.vllm_lens import hook_wire, tensors
from vllm.interop.vllm_lens.requests import INSTANCE

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.capture.types import CaptureResult

RESIDUAL_STREAM = "residual_stream"


def activations_of(output: "RequestOutput") -> dict[str, torch.Tensor] | None:
    """`{"residual_stream": [layers ascending, P+N-1, hidden_size]}`.

    None if the request did not ask, or has not ended. For several samples, those of the
    first.

    Raises:
        RuntimeError: rows are missing; the message has the reason.

    """
    result = _result(output)
    if result is None or result.status == "pending":
        return None
    if result.status != "ok":
        raise RuntimeError(
            f"activations of request {output.request_id} are not complete: "
            f"{result.error}"
        )
    return _stacked(output, result)


def _result(output: "RequestOutput") -> "CaptureResult | None":
    kept: CaptureResult | None = output.lens_result
    return kept or (output.capture_results or {}).get(INSTANCE)


def _stacked(
    output: "RequestOutput", result: "CaptureResult"
) -> dict[str, torch.Tensor] | None:
    payload = result.payload
    if isinstance(payload, Mapping) and 0 in payload:
        payload = payload[0]
    if not payload:
        return None
    return {RESIDUAL_STREAM: torch.stack([payload[tap] for tap in sorted(payload)])}


def detach(output: "RequestOutput | None") -> None:
    """Remove the rows from `capture_results`, because `activations` has them.

    A result without rows stays there, with its reason.
    """
    if output is None or not output.capture_results:
        return
    result = output.capture_results.get(INSTANCE)
    if result is not None and result.status == "ok":
        output.lens_result = output.capture_results.pop(INSTANCE)


def response_activations(
    outputs: Sequence["RequestOutput | None"],
) -> dict[str, Any] | None:
    """The field `activations` of a response; for several prompts, the first one's.

    Must be called before the response's `capture_results` are created.
    """
    for output in outputs:
        detach(output)
    found = next((o for o in outputs if o is not None), None)
    if found is None or found.lens_result is None:
        return None
    activations = _stacked(found, found.lens_result)
    if activations is None:
        return None
    return tensors.encode_all(activations)


def response_hook_results(
    outputs: Sequence["RequestOutput | None"],
) -> dict[str, Any] | None:
    """The field `hook_results` of a response; of several prompts, the first's."""
    found = next((o for o in outputs if o is not None), None)
    if found is None or found.hook_results is None:
        return None
    return hook_wire.encode(found.hook_results)


def last_chunks(output: "RequestOutput | None") -> list[str]:
    """What a stream sends before `[DONE]`: one event with what there is, or nothing."""
    found = {
        "activations": response_activations([output]),
        "hook_results": response_hook_results([output]),
    }
    content = {name: one for name, one in found.items() if one is not None}
    return [_event(content)] if content else []


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"

# SPDX-License-Identifier: Apache-2.0
"""The activations of a response, in the form of `ModelOutput.metadata`.

They are available to scorers and are never written to a log: Inspect writes null for
values of unknown classes.
"""

import base64
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from vllm.interop.vllm_lens import tensors
from vllm.interop.vllm_lens.responses import RESIDUAL_STREAM

KINDS = {
    "pre_attn": "resid_pre",
    "post_attn": "resid_mid",
    "post_block": "resid_post",
    "attn_out": "attn_out",
    "mlp_out": "mlp_out",
    "q": "q",
    "k": "k",
    "v": "v",
    "z": "z",
}
"""Our hook points, by the kinds that TransformerLens' providers use."""


class TensorPayload(Mapping[str, Any]):
    """A tensor as `{"data": base64, "dtype", "shape"}`, encoded on access."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        """`[tokens, width]`, in the model's dtype."""

    def __getitem__(self, name: str) -> Any:
        if name == "data":
            plain = self.tensor.contiguous().view(torch.uint8)
            return base64.b64encode(plain.numpy().tobytes()).decode()
        if name == "dtype":
            return str(self.tensor.dtype).removeprefix("torch.")
        if name == "shape":
            return list(self.tensor.shape)
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(("data", "dtype", "shape"))

    def __len__(self) -> int:
        return 3


def activations_of(
    response: Mapping[str, Any], layers: Sequence[int] | None
) -> dict[str, Any]:
    """Extract the activations from a response's JSON.

    Args:
        response: has `activations`, rows in `capture_results`, or neither.
        layers: the layers that `output_residual_stream` named, ascending; None for all.

    Returns:
        `residual_stream` `[layers, tokens, hidden_size]` if there is one, and a
        `TensorPayload` for each `"<layer>:<kind>"`.

    """
    found: dict[str, Any] = {}
    for name, raw in (response.get("activations") or {}).items():
        stack = tensors.decode(raw)
        found[name] = stack
        if name == RESIDUAL_STREAM:
            numbers = range(len(stack)) if layers is None else layers
            for layer, rows in zip(numbers, stack):
                found[f"{layer}:resid_post"] = TensorPayload(rows)
    for result in (response.get("capture_results") or {}).values():
        for entry in _entries(result.get("payload")):
            kind = KINDS.get(entry["hook"], entry["hook"])
            found.setdefault(f"{entry['layer']}:{kind}", TensorPayload(_rows(entry)))
    return found


def without_rows(capture_results: Mapping[str, Any]) -> dict[str, Any]:
    """The results by instance, without payloads of rows."""
    return {
        name: {
            key: value
            for key, value in result.items()
            if key != "payload" or not _entries(value)
        }
        for name, result in capture_results.items()
    }


def _entries(payload: Any) -> list[dict[str, Any]]:
    if not isinstance(payload, list):
        return []
    return [one for one in payload if isinstance(one, dict) and "data" in one]


def _rows(entry: Mapping[str, Any]) -> torch.Tensor:
    data, shape = entry["data"], entry["shape"]
    if isinstance(data, memoryview):
        dtype = getattr(torch, entry["dtype"])
        if not data:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(data, dtype=dtype).view(shape)
    return tensors.decode(
        {"data": data, "original_dtype": entry["dtype"], "shape": shape}
    )

# SPDX-License-Identifier: Apache-2.0
"""A minimal capture consumer: the mean norm of each layer's rows.

vllm serve MODEL --capture-consumers mean_norm:hook=post_block

A request contains {"capture": {"mean_norm": {"layers": [0, 5]}}}, and the payload of
its result is {"0": 12.5, "5": 48.1}.
"""

from typing import Any, ClassVar

import torch

from vllm.v1.capture.consumer import CaptureConsumer
from vllm.v1.capture.errors import CaptureValidationError
from vllm.v1.capture.types import CaptureContext, CaptureKey, CaptureSpec


class MeanNorm(CaptureConsumer):
    """Runs in the worker process and receives all rows of a layer at once."""

    reads_client_spec: ClassVar[bool] = True

    def __init__(self, vllm_config: Any, params: dict[str, Any]) -> None:
        unknown = params.keys() - {"hook"}
        if unknown:
            raise ValueError(
                f"unknown parameters {sorted(unknown)}; the only one is hook"
            )
        self._hook = params.get("hook", "post_block")

    def validate_client_spec(self, raw: Any, ctx: CaptureContext) -> CaptureSpec:
        """Check a request's options before it is scheduled."""
        layers = raw.get("layers") if isinstance(raw, dict) else None
        if not isinstance(layers, list) or not layers:
            raise CaptureValidationError(
                'capture.mean_norm must be {"layers": [...]} with layers from 0 to '
                f"{ctx.num_hidden_layers - 1}",
                parameter="capture.mean_norm",
                value=raw,
            )
        return CaptureSpec({self._hook: layers}, "all")

    def on_capture(
        self, key: CaptureKey, tensor: torch.Tensor, sidecar: dict[str, Any]
    ) -> dict[str, float]:
        """Process the rows `[rows, hidden_size]` of one layer; returns the payload."""
        _, layer, _ = key
        return {str(layer): tensor.float().norm(dim=-1).mean().item()}

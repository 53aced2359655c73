# SPDX-License-Identifier: Apache-2.0
"""A linear probe that learns online, in the process of the `LLM` or the API server.

vllm serve MODEL --capture-consumers probe_trainer:layer=3,save=/data/probe.pt

A request trains the probe with {"capture": {"probe_trainer": {"label": 1}}} (label 0 or
1), and queries it with {"capture": {"probe_trainer": {}}}. The payload has the
probability that the probe gave before it was trained, and its accuracy over the last
labelled requests.
"""

from collections import deque
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from vllm.v1.capture.consumer import CaptureConsumer
from vllm.v1.capture.errors import CaptureValidationError
from vllm.v1.capture.types import CaptureContext, CaptureKey, CaptureSpec

WINDOW = 100
"""Number of labelled requests over which the accuracy is computed."""


class ProbeTrainer(CaptureConsumer):
    """Logistic regression on the row of the last prompt token.

    With `location = "driver"` the one probe receives the rows of all workers; all calls
    come from one thread, so it needs no lock.
    """

    location: Literal["worker", "driver"] = "driver"
    reads_client_spec: ClassVar[bool] = True
    required_sidecar_fields: ClassVar[frozenset[str]] = frozenset({"client_spec"})

    def __init__(self, vllm_config: Any, params: dict[str, Any]) -> None:
        unknown = params.keys() - {"layer", "hook", "rate", "save"}
        if unknown or "layer" not in params:
            raise ValueError("the parameters are layer=, and hook=, rate=, save=")
        self._layer = int(params["layer"])
        self._hook = params.get("hook", "post_block")
        self._rate = float(params.get("rate", 0.5))
        self._save = params.get("save")
        self._weights: torch.Tensor | None = None  # [hidden_size + 1]
        self._right: deque[bool] = deque(maxlen=WINDOW)

    def validate_client_spec(self, raw: Any, ctx: CaptureContext) -> CaptureSpec:
        """Check a request's options: `{"label": 0 or 1}`, or `{}` for a query."""
        if not isinstance(raw, dict) or raw.keys() - {"label"}:
            raise CaptureValidationError(
                'capture.probe_trainer must be {"label": 0 or 1}, or {} for a query',
                parameter="capture.probe_trainer",
                value=raw,
            )
        if raw.get("label") not in (None, 0, 1):
            raise CaptureValidationError(
                "capture.probe_trainer.label must be 0 or 1",
                parameter="capture.probe_trainer.label",
                value=raw["label"],
            )
        return CaptureSpec({self._hook: [self._layer]}, "last_prompt")

    def on_capture(
        self, key: CaptureKey, tensor: torch.Tensor, sidecar: dict[str, Any]
    ) -> dict[str, Any]:
        """Predict the label, then train on it if one is given."""
        row = torch.nn.functional.normalize(tensor[0].float(), dim=0)
        row = torch.cat([row, torch.ones(1)])
        if self._weights is None:
            self._weights = torch.zeros(len(row))
        chance = torch.sigmoid(self._weights @ row).item()
        label = sidecar["client_spec"].get("label")
        if label is not None:
            self._right.append((chance > 0.5) == bool(label))
            self._weights += self._rate * (label - chance) * row
        accuracy = sum(self._right) / len(self._right) if self._right else None
        return {"probability": chance, "accuracy": accuracy}

    def shutdown(self, timeout: float = 30.0) -> None:
        """Save the weights, if there are any."""
        if self._save is not None and self._weights is not None:
            Path(self._save).parent.mkdir(parents=True, exist_ok=True)
            torch.save(self._weights, self._save)

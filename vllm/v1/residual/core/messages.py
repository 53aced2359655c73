# SPDX-License-Identifier: Apache-2.0
"""What the features add to the messages between an engine's processes.

Upstream's messages import their types from here: requests, what the engine core sends a
front end at its start and with tokens, and what workers send the engine core.
"""

from typing import TYPE_CHECKING, Any

import msgspec

from vllm.v1.hooks.plan import HookPlan
from vllm.v1.residual.capture_plan import CapturePlan
from vllm.v1.residual.readout_plan import ReadoutPart, StepReadouts
from vllm.v1.residual.receipts import Fired, ReceiptPart, StepReceipt
from vllm.v1.residual.steering_actions import Acting, Action
from vllm.v1.steering.plan import SteeringTiers

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = [
    "Acting",
    "Action",
    "CapturePlan",
    "Fired",
    "HookPlan",
    "ModelFacts",
    "RequestResults",
    "SteeringTiers",
    "StepReadouts",
    "StepReceipt",
]


class RequestResults(
    msgspec.Struct,
    array_like=True,
    omit_defaults=True,
    gc=False,
):
    """The results of a request that no output has carried yet."""

    readouts: list[ReadoutPart] | None = None
    receipt: list[ReceiptPart] | None = None
    """What steering has done to the request's tokens."""


class ModelFacts(msgspec.Struct, frozen=True):
    """What is known only once the model is loaded, and needed for admission."""

    hook_points: dict[int, list[str]] | None = None
    point_shapes: dict[int, dict[str, tuple[int, int]]] = {}
    staging: list[dict[str, int]] = []
    """As in `CaptureConfig`."""
    missing: dict[str, str] = {}
    readout_refusals: dict[str, Any] = {}
    """What readouts cannot read, as in `Refusals`."""

    def note(self, config: "VllmConfig") -> None:
        """Store them in the configuration of the front end's process."""
        config.capture_config.hook_points = self.hook_points
        config.capture_config.point_shapes = self.point_shapes
        config.capture_config.staging = self.staging
        config.capture_config.missing = self.missing
        config.readout_config.refusals = self.readout_refusals

# SPDX-License-Identifier: Apache-2.0
"""Changes of steering by consumers, under the name that plug-ins import."""

from vllm.v1.residual.steering_actions import (
    Action as SteeringAction,
)
from vllm.v1.residual.steering_actions import (
    RequestSteeringOverride,
    SteeringActionQueue,
    SteeringMonitorUpdate,
    SteeringScaleUpdate,
    SteeringVectorUpdate,
    get_steering_action_queue,
    install_steering_action_queue,
)

__all__ = [
    "RequestSteeringOverride",
    "SteeringAction",
    "SteeringActionQueue",
    "SteeringMonitorUpdate",
    "SteeringScaleUpdate",
    "SteeringVectorUpdate",
    "get_steering_action_queue",
    "install_steering_action_queue",
]

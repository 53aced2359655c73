# SPDX-License-Identifier: Apache-2.0
"""The configurations of the features, which are fields of `VllmConfig`."""

from vllm.config.capture import CaptureConfig
from vllm.config.readouts import ReadoutConfig
from vllm.config.steering import SteeringConfig

__all__ = ["CaptureConfig", "ReadoutConfig", "SteeringConfig"]

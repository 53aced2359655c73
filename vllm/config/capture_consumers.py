# SPDX-License-Identifier: Apache-2.0
"""The configuration of consumers, where plug-ins may look for it."""

from vllm.v1.capture.config import (
    CaptureConsumersConfig,
    CaptureConsumerSpec,
    parse_consumer_spec,
)

__all__ = ["CaptureConsumerSpec", "CaptureConsumersConfig", "parse_consumer_spec"]

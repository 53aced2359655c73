# SPDX-License-Identifier: Apache-2.0
"""The configuration of consumers, where plug-ins may look for it."""

from vllm.config.capture import CaptureConfig as CaptureConsumersConfig
from vllm.config.capture import ConsumerConfig as CaptureConsumerSpec
from vllm.config.capture import parse_consumer as parse_consumer_spec

__all__ = ["CaptureConsumerSpec", "CaptureConsumersConfig", "parse_consumer_spec"]

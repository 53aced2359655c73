# SPDX-License-Identifier: Apache-2.0
"""The configuration of consumers under the names that plug-ins may use."""

from vllm.config.capture import CaptureConfig as CaptureConsumersConfig
from vllm.config.capture import ConsumerConfig as CaptureConsumerSpec
from vllm.config.capture import parse_consumer as parse_consumer_spec

__all__ = ["CaptureConsumerSpec", "CaptureConsumersConfig", "parse_consumer_spec"]

# SPDX-License-Identifier: Apache-2.0
"""The configuration of consumers under the names that plug-ins may use."""

from vllm.config.capture_consumers import (
    CaptureConsumersConfig,
    CaptureConsumerSpec,
    expand_graphsafe_keys,
    parse_consumer_spec,
    validate_consumer_specs,
)

__all__ = [
    "CaptureConsumerSpec",
    "CaptureConsumersConfig",
    "expand_graphsafe_keys",
    "parse_consumer_spec",
    "validate_consumer_specs",
]

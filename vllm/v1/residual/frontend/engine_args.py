# SPDX-License-Identifier: Apache-2.0
"""The options of the features, and their configurations made from the options."""

import argparse

from vllm.v1.capture.engine_args import add_capture_arguments, capture_config
from vllm.v1.readouts.engine_args import add_readout_arguments, readout_config
from vllm.v1.steering.frontend.engine_args import (
    add_steering_arguments,
    steering_config,
)

__all__ = ["add_arguments", "capture_config", "readout_config", "steering_config"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options, in the order of the help text."""
    add_capture_arguments(parser)
    add_readout_arguments(parser)
    add_steering_arguments(parser)

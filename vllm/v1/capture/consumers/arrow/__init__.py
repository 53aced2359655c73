# SPDX-License-Identifier: Apache-2.0
"""The consumer that writes Parquet, Arrow IPC or safetensors files."""

from vllm.v1.capture.consumers.arrow.consumer import ArrowConsumer

__all__ = ["ArrowConsumer"]

# SPDX-License-Identifier: Apache-2.0
"""The consumer `arrow`, which writes Parquet, Arrow IPC or safetensors files."""

from vllm.v1.capture.consumers.arrow.consumer import ArrowConsumer
from vllm.v1.capture.consumers.arrow.table import rows_of

__all__ = ["ArrowConsumer", "rows_of"]

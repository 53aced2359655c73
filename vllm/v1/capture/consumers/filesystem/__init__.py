# SPDX-License-Identifier: Apache-2.0
"""The consumer `filesystem`, which writes rows to files, and functions to read them."""

from vllm.v1.capture.consumers.filesystem.consumer import FilesystemConsumer
from vllm.v1.capture.consumers.filesystem.entries import CaptureEntry
from vllm.v1.capture.consumers.filesystem.reader import (
    read_packed,
    read_per_file,
    read_request,
    read_sharded,
)
from vllm.v1.capture.consumers.filesystem.store import CaptureStore
from vllm.v1.capture.consumers.filesystem.types import FilesystemCaptureRequest

__all__ = [
    "CaptureEntry",
    "CaptureStore",
    "FilesystemCaptureRequest",
    "FilesystemConsumer",
    "read_packed",
    "read_per_file",
    "read_request",
    "read_sharded",
]

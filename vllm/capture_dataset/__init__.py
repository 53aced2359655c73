# SPDX-License-Identifier: Apache-2.0
"""Data sets of captured rows: collected by `vllm capture`, opened by `load_dataset`."""

from vllm.capture_dataset.dataset import CaptureDataset, load_dataset
from vllm.capture_dataset.view import LayerView

__all__ = ["CaptureDataset", "LayerView", "load_dataset"]

# SPDX-License-Identifier: Apache-2.0
"""How wide a row of the residual stream is."""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def torch_dtype(vllm_config: "VllmConfig") -> torch.dtype:
    """The dtype of the residual stream; the configuration has resolved names."""
    dtype = vllm_config.model_config.dtype
    assert isinstance(dtype, torch.dtype), f"the dtype {dtype!r} is not resolved"
    return dtype


def row_bytes(vllm_config: "VllmConfig") -> int:
    """The bytes of one row."""
    width: int = vllm_config.model_config.get_hidden_size()
    return width * torch_dtype(vllm_config).itemsize

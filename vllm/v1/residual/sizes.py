# SPDX-License-Identifier: Apache-2.0
"""How wide a row of the residual stream is, and how much memory a step's rows get."""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm.config import ModelConfig

LEAST_STAGING = 256 << 20
"""Bytes."""
STAGING_SHARE = 32
"""By itself staging takes at most this part of the memory that the server may use."""


def torch_dtype(model_config: "ModelConfig") -> torch.dtype:
    """The dtype of the residual stream; the configuration has resolved names."""
    dtype = model_config.dtype
    assert isinstance(dtype, torch.dtype), f"the dtype {dtype!r} is not resolved"
    return dtype


def row_bytes(model_config: "ModelConfig") -> int:
    """The bytes of one row."""
    width: int = model_config.get_hidden_size()
    return width * torch_dtype(model_config).itemsize


def default_staging_bytes(
    bytes_a_row: int, layers: int, tokens_a_step: int, device_bytes: int
) -> int:
    """Staging memory where the user names no size and `device_bytes` are ours to use.

    Two of the largest steps have room, at one hook point of every layer: a smaller step
    costs the processor as much as a large one and keeps the GPU less busy.
    """
    wanted = 2 * tokens_a_step * layers * bytes_a_row
    return max(LEAST_STAGING, min(wanted, device_bytes // STAGING_SHARE))

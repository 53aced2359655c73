# SPDX-License-Identifier: Apache-2.0
"""Sizes of rows and of pipeline stages, and the default size of staging memory."""

from typing import TYPE_CHECKING

import torch

from vllm.distributed.utils import get_pp_indices

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

LEAST_STAGING = 256 << 20
"""Minimum default size of staging memory, in bytes."""
STAGING_SHARE = 24
"""The default is at most the memory that the server may use divided by this."""


def torch_dtype(model_config: "ModelConfig") -> torch.dtype:
    """The dtype of the residual stream."""
    dtype = model_config.dtype
    assert isinstance(dtype, torch.dtype), f"the dtype {dtype!r} is not resolved"
    return dtype


def row_bytes(model_config: "ModelConfig") -> int:
    """Bytes of one row, `[hidden_size]`."""
    width: int = model_config.get_hidden_size()
    return width * torch_dtype(model_config).itemsize


def num_layers(model_config: "ModelConfig") -> int:
    """Number of blocks of the decoder.

    Of an encoder-decoder upstream's own count is the encoder's.
    """
    if not model_config.is_encoder_decoder:
        return int(model_config.get_total_num_hidden_layers())
    text = model_config.hf_text_config
    if hasattr(text, "transf_decoder"):  # Cohere's ASR models
        return int(text.transf_decoder["config_dict"]["num_layers"])
    return int(text.decoder_layers)


def stage_starts(vllm_config: "VllmConfig") -> list[int]:
    """The first layer of each pipeline stage."""
    layers = num_layers(vllm_config.model_config)
    count = vllm_config.parallel_config.pipeline_parallel_size
    return [get_pp_indices(layers, stage, count)[0] for stage in range(count)]


def default_staging_bytes(
    bytes_a_row: int,
    layers: int,
    tokens_a_step: int,
    device_bytes: int,
    num_steps: int = 2,
) -> int:
    """The default size of staging memory, in bytes.

    It holds some steps of maximum size, at one hook point of every layer. Smaller steps
    would cost the CPU as much and leave the GPU less busy.

    Args:
        bytes_a_row: bytes of one row.
        layers: number of decoder blocks.
        tokens_a_step: maximum number of tokens per step.
        device_bytes: device memory that the server may use.
        num_steps: how many steps it holds: two, with readouts three.

    """
    wanted = tokens_a_step * layers * bytes_a_row
    step = max(LEAST_STAGING // 2, min(wanted, device_bytes // STAGING_SHARE // 2))
    return num_steps * step

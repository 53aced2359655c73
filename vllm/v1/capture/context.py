# SPDX-License-Identifier: Apache-2.0
"""Builds the `CaptureContext` of a request, alike at admission and in a worker."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm.v1.capture.types import (
    CaptureContext,
    VllmInternalRequestId,
    capture_expert_parallel_size,
)
from vllm.v1.residual.sizes import torch_dtype

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def capture_context(
    vllm_config: "VllmConfig",
    hook_points: Mapping[int, tuple[str, ...]],
    request_id: str,
    num_prompt_tokens: int,
    max_tokens: int | None,
    num_samples: int = 1,
) -> CaptureContext:
    """The context of one request.

    Args:
        vllm_config: the engine's configuration.
        hook_points: the hook points of each layer of the model, over all stages.
        request_id: the request's internal id.
        num_prompt_tokens: of the request.
        max_tokens: how many tokens the request may generate; None if unlimited.
        num_samples: `n` of the request.

    """
    model_config = vllm_config.model_config
    parallel_config = vllm_config.parallel_config
    return CaptureContext(
        vllm_internal_request_id=VllmInternalRequestId(request_id),
        num_prompt_tokens=num_prompt_tokens,
        num_computed_tokens=0,
        num_hidden_layers=max(hook_points, default=-1) + 1,
        hidden_size=model_config.get_hidden_size(),
        element_size_bytes=torch_dtype(vllm_config.model_config).itemsize,
        tensor_parallel_size=parallel_config.tensor_parallel_size,
        pipeline_parallel_size=parallel_config.pipeline_parallel_size,
        max_tokens=max_tokens,
        hook_points=dict(hook_points),
        point_shapes=vllm_config.capture_config.point_shapes,
        missing=vllm_config.capture_config.missing,
        num_samples=num_samples,
        expert_parallel_size=capture_expert_parallel_size(parallel_config),
        data_parallel_size=parallel_config.data_parallel_size,
    )

# SPDX-License-Identifier: Apache-2.0
"""The types that consumers, plugins and clients of capture see."""

from dataclasses import dataclass, field
from typing import Any, Literal, NewType, TypeAlias

import torch

VllmInternalRequestId = NewType("VllmInternalRequestId", str)
"""The id that the engine gives a request: unique, opaque, never chosen by a client."""

HookName = Literal["pre_attn", "post_attn", "post_block", "mlp_in", "mlp_out"]
"""Where in a decoder block a row is read.

`pre_attn`: the residual stream entering the block. `post_attn`: after the
attention (or other token mixer) was added. `post_block`: leaving the block,
before any final norm. `mlp_in`, `mlp_out`: what enters and leaves the MLP.
"""

HOOK_NAMES: tuple[HookName, ...] = (
    "pre_attn",
    "post_attn",
    "post_block",
    "mlp_in",
    "mlp_out",
)

PositionSelector: TypeAlias = (
    Literal["last_prompt", "all_prompt", "all_generated", "all"] | list[int]
)
"""Which rows of a request: a name, or a list of 0-based token positions."""

CaptureKey: TypeAlias = tuple[VllmInternalRequestId, int, str]
"""`(request id, layer, hook)`: one stream of rows."""

CaptureStatus = Literal["pending", "ok", "partial_error", "error", "not_requested"]


@dataclass(frozen=True)
class CaptureSpec:
    """What to capture of a request: `hooks` maps a hook point to its layers."""

    hooks: dict[HookName, list[int]]
    positions: PositionSelector


@dataclass
class CaptureChunk:
    """Rows of one key, in ascending position, as a step produced them."""

    key: CaptureKey
    tensor: torch.Tensor
    """`[rows, hidden_size]` on the CPU, in the stream's dtype; the receiver owns it."""
    dtype: torch.dtype
    row_offset: int
    """How many rows of this key came before."""
    step_index: int
    """The engine step that computed the last of these rows."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """`positions`: the token position of each row, `list[int]`."""


@dataclass
class CaptureFinalize:
    """The request has ended and every chunk of `key` has been submitted."""

    key: CaptureKey
    sidecar: dict[str, Any] = field(default_factory=dict)


@dataclass
class CaptureResult:
    """What became of a request's capture at one consumer instance.

    `key` is a stream's `(request id, layer, hook)` where a sink reports on one
    stream, and `(request id, -1, "*")` where the results of all streams of a
    request were merged, as in `RequestOutput.capture_results`.
    """

    key: CaptureKey
    status: CaptureStatus
    error: str | None = None
    payload: Any = None


@dataclass
class CaptureContext:
    """What a consumer may know of a request when it validates its spec."""

    vllm_internal_request_id: VllmInternalRequestId
    num_prompt_tokens: int
    num_computed_tokens: int
    """Always 0: prompt rows behind the prefix cache are computed again."""
    num_hidden_layers: int
    """Decoder blocks of the whole model, over all pipeline stages."""
    hidden_size: int
    element_size_bytes: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    max_tokens: int | None = None
    """How many tokens the request may generate at most."""
    hook_points: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """The hook points that each layer of the loaded model has."""
    num_samples: int = 1
    """`n` of the request."""
    expert_parallel_size: int = 1
    data_parallel_size: int = 1


def captured_prompt_positions(spec: CaptureSpec, num_prompt_tokens: int) -> list[int]:
    """The positions of prompt tokens that a spec captures, ascending."""
    match spec.positions:
        case "last_prompt":
            return [num_prompt_tokens - 1]
        case "all_prompt" | "all":
            return list(range(num_prompt_tokens))
        case str():
            return []
    listed = {p if p >= 0 else num_prompt_tokens + p for p in spec.positions}
    return sorted(p for p in listed if 0 <= p < num_prompt_tokens)


def min_captured_prompt_position(
    spec: CaptureSpec, num_prompt_tokens: int
) -> int | None:
    """The first of them; None if no prompt token is captured."""
    positions = captured_prompt_positions(spec, num_prompt_tokens)
    return positions[0] if positions else None


def spec_touches_prompt(spec: CaptureSpec, num_prompt_tokens: int) -> bool:
    """Whether a spec captures a prompt token."""
    return bool(captured_prompt_positions(spec, num_prompt_tokens))


def capture_expert_parallel_size(parallel_config: Any = None) -> int:
    """How many ranks share the experts; 1 without expert parallelism.

    Args:
        parallel_config: of the engine; without it there is no expert parallelism.

    """
    if parallel_config is None or not parallel_config.enable_expert_parallel:
        return 1
    ranks = parallel_config.tensor_parallel_size * parallel_config.data_parallel_size
    return int(ranks)

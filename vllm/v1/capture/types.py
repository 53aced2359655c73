# SPDX-License-Identifier: Apache-2.0
"""Public data types of capture, for consumers, plug-ins and clients."""

from dataclasses import dataclass, field
from functools import partial
from html import escape
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch

from vllm.v1.capture.errors import fail
from vllm.v1.residual.row_selection import CaptureContext as CaptureContext
from vllm.v1.residual.row_selection import CaptureSpec as CaptureSpec
from vllm.v1.residual.row_selection import PositionSelector as PositionSelector
from vllm.v1.residual.row_selection import (
    VllmInternalRequestId as VllmInternalRequestId,
)
from vllm.v1.residual.selectors import as_list, parse_positions
from vllm.v1.residual.sizes import torch_dtype
from vllm.v1.residual.spans import NAMED, selected
from vllm.v1.residual.tap import HOOK_NAMES as HOOK_NAMES
from vllm.v1.residual.tap import HookName as HookName

if TYPE_CHECKING:
    from vllm.config import VllmConfig

CaptureKey: TypeAlias = tuple[VllmInternalRequestId, int, str]
"""`(request id, layer, hook)`: identifies one sequence of rows."""

CaptureStatus = Literal["pending", "ok", "partial_error", "error", "not_requested"]


@dataclass
class CaptureChunk:
    """Consecutive rows of one key, in ascending position."""

    key: CaptureKey
    tensor: torch.Tensor
    """`[rows, hidden_size]` on the CPU, in the stream's dtype; the receiver owns it."""
    dtype: torch.dtype
    row_offset: int
    """The number of rows of this key in earlier chunks."""
    step_index: int
    """The index of the engine step that computed the last of these rows."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """`positions`: the token position of each row, `list[int]`."""


@dataclass
class CaptureFinalize:
    """Marks the end of a key: the request ended and all its chunks were submitted."""

    key: CaptureKey
    sidecar: dict[str, Any] = field(default_factory=dict)
    """Facts about the request and the rows; see `registry.SIDECAR_FIELDS`."""


@dataclass
class CaptureResult:
    """The result of a capture at one consumer instance.

    `key` is `(request id, layer, hook)` in the result of a single key, which a sink
    returns, and `(request id, -1, "*")` in the merged result of a request, as in
    `RequestOutput.capture_results`.
    """

    key: CaptureKey
    status: CaptureStatus
    error: str | None = None
    payload: Any = None
    kept: int | None = None
    """With `keep_when`, the number of rows that were kept, over all hook points."""
    cached_rows: int | None = None
    """With an activation store, the number of rows from it, over all hook points."""

    def _repr_html_(self) -> str | None:
        """For notebooks, if its payload has such a form."""
        shown = getattr(self.payload, "_repr_html_", lambda: None)()
        said = self.status if self.error is None else f"{self.status}: {self.error}"
        return None if shown is None else f"<p>{escape(said)}</p>{shown}"


def captured_prompt_positions(spec: CaptureSpec, num_prompt_tokens: int) -> list[int]:
    """The positions of prompt tokens that a spec captures, ascending."""
    spans = parse_positions(as_list(spec.positions), "positions", fail)
    if isinstance(spans, str):
        spans = NAMED.get("all_prompt" if spans == "all" else spans) or ()
    return selected(spans, num_prompt_tokens, 0, num_prompt_tokens)


def min_captured_prompt_position(
    spec: CaptureSpec, num_prompt_tokens: int
) -> int | None:
    """The lowest prompt position that a spec captures; None if it captures none."""
    positions = captured_prompt_positions(spec, num_prompt_tokens)
    return positions[0] if positions else None


def spec_touches_prompt(spec: CaptureSpec, num_prompt_tokens: int) -> bool:
    """Whether a spec captures any prompt token."""
    return bool(captured_prompt_positions(spec, num_prompt_tokens))


def capture_expert_parallel_size(parallel_config: Any = None) -> int:
    """The number of ranks that share the experts; 1 without expert parallelism.

    Args:
        parallel_config: upstream's `ParallelConfig`; None means no expert parallelism.

    """
    if parallel_config is None or not parallel_config.enable_expert_parallel:
        return 1
    ranks = parallel_config.tensor_parallel_size * parallel_config.data_parallel_size
    return int(ranks)


def contexts_of(vllm_config: "VllmConfig") -> "partial[CaptureContext]":
    """Makes the contexts of requests, alike at admission and in a worker.

    Args:
        vllm_config: the engine's configuration, with the loaded model's hook points.

    Returns:
        What is left to give is the request's internal id, the number of its prompt
        tokens, and by name `max_tokens` and `num_samples`.

    """
    model_config = vllm_config.model_config
    parallel_config = vllm_config.parallel_config
    points = vllm_config.capture_config.hook_points or {}
    return partial(
        CaptureContext,
        num_computed_tokens=0,
        num_hidden_layers=max(points, default=-1) + 1,
        hidden_size=model_config.get_hidden_size(),
        element_size_bytes=torch_dtype(model_config).itemsize,
        tensor_parallel_size=parallel_config.tensor_parallel_size,
        pipeline_parallel_size=parallel_config.pipeline_parallel_size,
        hook_points={layer: tuple(names) for layer, names in points.items()},
        point_shapes=vllm_config.capture_config.point_shapes,
        missing=vllm_config.capture_config.missing,
        expert_parallel_size=capture_expert_parallel_size(parallel_config),
        data_parallel_size=parallel_config.data_parallel_size,
    )

# SPDX-License-Identifier: Apache-2.0
"""The functions that a decoder layer calls at its hook points.

The build weaves calls of `pair`, `partial`, `stream`, `streams` and `value` into the
`forward` of every decoder layer and decorates the class with `tapped`. A layer that
may split its tokens over the tensor-parallel ranks calls `split_pair` or `split_value`
while it does.
With capture and steering off, `layer.residual_taps` is None: the calls return their
arguments and leave nothing in a compiled graph.

A layer that runs several times per pass states at each call which run it is, and has
separate hook points for each run.

Shapes: `hidden_states` and `residual` are `[num_tokens, hidden_size]` in the stream's
dtype.
"""

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn

from vllm.distributed import (
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
)
from vllm.model_executor.layers.residual.point import ResidualTap

Taps: TypeAlias = dict[tuple[str, int], ResidualTap] | None
"""Taps by hook point and run."""

LayerClass = TypeVar("LayerClass", bound=type[nn.Module])


def tapped(
    *points: str, partial: tuple[str, ...] = ()
) -> Callable[[LayerClass], LayerClass]:
    """Class decorator: `forward` of this decoder layer has calls at `points`.

    Args:
        points: in the order of the forward pass.
        partial: those that it has with one tensor-parallel rank only: of several, each
            holds a part of the sum.

    """

    def record(layer_class: LayerClass) -> LayerClass:
        layer_class.residual_taps = None  # type: ignore[attr-defined]
        layer_class.hook_points = points  # type: ignore[attr-defined]
        layer_class.hook_points_partial = partial  # type: ignore[attr-defined]
        layer_class.hook_points_forward = layer_class.forward  # type: ignore[attr-defined]
        return layer_class

    return record


def num_streams(layer: nn.Module) -> int:
    """The number of streams of `layer`'s residual; 0 if it is one stream."""
    return int(getattr(layer, "hook_points_streams", 0))


def hook_points(layer: nn.Module) -> tuple[str, ...]:
    """The hook points of `layer`; empty if its `forward` is not the woven one.

    A plug-in's subclass that overrides `forward` inherits the list of points but not
    the calls.
    """
    cls: Any = type(layer)
    woven = getattr(cls, "hook_points_forward", None)
    if woven is None or cls.forward is not woven:
        return ()
    lacks: tuple[str, ...] = cls.hook_points_partial
    if lacks and get_tensor_model_parallel_world_size() == 1:
        lacks = ()
    lacks = (*lacks, *getattr(layer, "hook_points_lacking", ()))
    return tuple(point for point in cls.hook_points if point not in lacks)


def attach(layer: nn.Module, point: str, tap: ResidualTap, run: int = 0) -> None:
    """Attach a tap to one hook point of `layer`, for one of its runs."""
    # Set in the instance's dictionary: other instances must keep the class attribute
    # None, which `torch.compile` treats as a constant.
    layer.__dict__.setdefault("residual_taps", {})[point, run] = tap


def pair(
    layer: nn.Module,
    point: str,
    hidden_states: torch.Tensor,  # [num_tokens, hidden_size]
    residual: torch.Tensor | None,  # same shape
    run: int = 0,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A hook point where the stream is `hidden_states + residual`.

    Without a residual, `hidden_states` is the stream. Returns the pair with which the
    layer continues.
    """
    taps: Taps = layer.residual_taps  # type: ignore[assignment]
    if taps is None or (point, run) not in taps:
        return hidden_states, residual
    return taps[point, run](hidden_states, residual)


def partial(
    layer: nn.Module,
    point: str,
    hidden_states: torch.Tensor,
    residual: torch.Tensor | None,
    run: int = 0,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As `pair`, where `hidden_states` has not been all-reduced over ranks yet."""
    taps: Taps = layer.residual_taps  # type: ignore[assignment]
    if taps is None or (point, run) not in taps:
        return hidden_states, residual
    return taps[point, run].on_partial(hidden_states, residual)


def stream(
    layer: nn.Module, point: str, hidden_states: torch.Tensor, run: int = 0
) -> torch.Tensor:
    """A hook point where `hidden_states` is the stream itself."""
    return pair(layer, point, hidden_states, None, run)[0]


def streams(
    layer: nn.Module,
    point: str,
    hidden_states: torch.Tensor,  # [num_tokens, streams, hidden_size]
    run: int = 0,
) -> torch.Tensor:
    """A hook point on all streams of a residual that has several.

    A row is a token's streams, one after the other. They may be one axis already, as in
    `[num_tokens, streams * hidden_size]`.
    """
    taps: Taps = layer.residual_taps  # type: ignore[assignment]
    if taps is None or (point, run) not in taps:
        return hidden_states
    rows = taps[point, run](hidden_states.flatten(1), None)[0]
    return rows.view(hidden_states.shape)


def streams_first(
    layer: nn.Module,
    point: str,
    hidden_states: torch.Tensor,  # [streams, num_tokens, hidden_size]
    run: int = 0,
) -> torch.Tensor:
    """As `streams`, where the streams are the first axis."""
    taps: Taps = layer.residual_taps  # type: ignore[assignment]
    if taps is None or (point, run) not in taps:
        return hidden_states
    rows = streams(layer, point, hidden_states.transpose(0, 1).contiguous(), run)
    return rows.transpose(0, 1).contiguous()


def split_pair(
    layer: nn.Module,
    point: str,
    hidden_states: torch.Tensor,  # [ceil(num_tokens / ranks), hidden_size]
    residual: torch.Tensor | None,
    run: int = 0,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As `pair`, where tokens are split over the tensor-parallel ranks."""
    taps: Taps = layer.residual_taps  # type: ignore[assignment]
    if taps is None or (point, run) not in taps:
        return hidden_states, residual
    return taps[point, run].on_split(hidden_states, residual)


def split_value(
    layer: nn.Module, point: str, hidden_states: torch.Tensor, run: int = 0
) -> torch.Tensor:
    """As `value`, where tokens are split over the tensor-parallel ranks."""
    return split_pair(layer, point, hidden_states, None, run)[0]


def lone_token(
    layer: nn.Module,
    num_tokens: int,
    hidden_states: torch.Tensor,  # [ceil(num_tokens / ranks), hidden_size]
    residual: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give all ranks the first rank's share if the step has only one token.

    The layers that call this recognise split tokens by their number, so they take one
    rank's share of a single token for all tokens. Compiled code is not affected: it is
    traced with more tokens.
    """
    if layer.residual_taps is None or hidden_states.shape[0] != num_tokens:
        return hidden_states, residual
    both = tensor_model_parallel_all_gather(torch.cat([hidden_states, residual], -1), 0)
    hidden_states, residual = both[:num_tokens].chunk(2, -1)
    return hidden_states.contiguous(), residual.contiguous()


value = stream
"""A hook point on a tensor other than the stream, such as the MLP's input."""

# SPDX-License-Identifier: Apache-2.0
"""Hook points of a decoder layer: the functions that it calls, and the taps there.

A tap captures, steers, and captures what results. The build weaves calls of `pair`,
`partial`, `stream`, `streams` and `value` into the `forward` of every decoder layer and
decorates the class with `tapped`. A layer that may split its tokens over the
tensor-parallel ranks calls `split_pair` or `split_value` while it does.
With capture and steering off, `layer.residual_taps` is None: the calls return their
arguments and leave nothing in a compiled graph.

A layer that runs several times per pass states at each call which run it is, and has
separate hook points for each run.

Shapes: `hidden_states` and `residual` are `[num_tokens, hidden_size]` in the stream's
dtype. Of a tap: T tokens of the step (padding included), H width of the stream, S rows
of staging memory, V rows of vectors.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn

from vllm.distributed import (
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
)
from vllm.model_executor.layers.residual import program_op, steer_op  # noqa: F401  their ops
from vllm.model_executor.layers.residual.capture_op import Launch
from vllm.model_executor.layers.residual.spread import SUMMANDS, TOKENS, WHOLE, share


@dataclass(eq=False)
class ResidualTap:
    """Persistent tensors of one hook point of one layer, read by recorded graphs.

    Capture, added vectors and programs are each optional. Everything that differs
    between layers is a tensor, so that the subgraphs of equal layers stay equal for
    the compile cache.
    """

    slots: torch.Tensor | None = None
    """`[T]` int32, may be strided. The token's staging row, or -1."""
    base: torch.Tensor | None = None
    """`[1]` int32, added to every slot."""
    staging: torch.Tensor | None = None
    """`[S, H]` in the stream's dtype."""
    table: torch.Tensor | None = None
    """`[V, H]` in the stream's dtype; row 0 adds nothing."""
    rows: torch.Tensor | None = None
    """`[>= T]` int32, the row of `table` for each token."""
    index: torch.Tensor | None = None
    """`[I]` int64, addresses of programs."""
    program_rows: torch.Tensor | None = None
    """`[>= T]` int32, the row of `index` for each token."""
    gates: torch.Tensor | None = None
    """`[>= T, columns]` float32."""
    after: torch.Tensor | None = None
    """As `slots`, of rows that are captured behind the interventions."""
    copies: int = field(default=WHOLE, kw_only=True)
    """If each tensor-parallel rank has some of a row's numbers: how many ranks have the
    same."""

    def __call__(
        self, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Capture, then steer.

        Args:
            hidden_states: `[T, H]` or `[1, T, H]`, the branch; without a residual the
                stream.
            residual: the other half of the pair, same shape, or None.

        Returns:
            The pair with which the layer continues.

        """
        return self._visit(hidden_states, residual, self.copies)

    def on_partial(
        self, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `__call__`, for a branch that has not been all-reduced yet.

        Without a residual there is no branch yet: `hidden_states` is the stream.
        """
        partial = residual is not None and get_tensor_model_parallel_world_size() > 1
        return self._visit(hidden_states, residual, SUMMANDS if partial else WHOLE)

    def on_split(
        self, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `__call__`, where tokens are split over the tensor-parallel ranks.

        Rows are all-gathered if the step captures any. Steering needs no
        communication: each rank changes its own tokens.
        """
        assert hidden_states.dim() == 2, f"split {tuple(hidden_states.shape)}"
        return self._visit(hidden_states, residual, TOKENS)

    def _visit(
        self, hidden_states: torch.Tensor, residual: torch.Tensor | None, spread: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        self._capture(self.slots, hidden_states, residual, spread)
        hidden_states, residual = self._steer(hidden_states, residual, spread == TOKENS)
        hidden_states, residual = self._intervene(hidden_states, residual, spread)
        self._capture(self.after, hidden_states, residual, spread)
        return hidden_states, residual

    def _capture(
        self,
        slots: torch.Tensor | None,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
        spread: int,
    ) -> None:
        """Copy rows to staging."""
        if slots is not None:
            torch.ops.vllm.capture_rows(
                hidden_states, residual, slots, self.base, self.staging, spread
            )

    def _steer(
        self, hidden_states: torch.Tensor, residual: torch.Tensor | None, split: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Add each token's vector; `split` if ranks split the tokens.

        In a compiled graph an op that launches only if a vector is set adds it to the
        residual in place, without a copy: the following fused norm may write it in
        place too, and unlike the branch it is never a partial sum. Without a residual
        the layer may hold another reference to the stream, so a copy is changed; the
        compiler fuses the copy into the kernel that produces the stream. A pass that is
        not compiled adds out of place.
        """
        table, rows = self.table, self.rows
        if table is None or rows is None:
            return hidden_states, residual
        if torch.compiler.is_compiling():
            return _steered_in_graph(hidden_states, residual, table, rows, split)
        if not Launch.wants(table):
            return hidden_states, residual
        if split:
            rows = rows[share(len(hidden_states))]
        tokens = hidden_states.numel() // hidden_states.shape[-1]
        vectors = table.index_select(0, rows[:tokens]).view(hidden_states.shape)
        if residual is None:
            return hidden_states + vectors, None
        return hidden_states, residual + vectors

    def _intervene(
        self, hidden_states: torch.Tensor, residual: torch.Tensor | None, spread: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run each token's program.

        Changed rows are written to the branch. The layer may still use the tensor that
        it passed, so a copy is written, which the compiler removes if nothing else
        reads the original. Inside a compiled graph the residual is written in place,
        as additions do.
        """
        index, rows, gates = self.index, self.program_rows, self.gates
        if index is None or rows is None or gates is None:
            return hidden_states, residual
        if not torch.compiler.is_compiling():
            if not Launch.wants(index):
                return hidden_states, residual
            residual = None if residual is None else residual.clone()
        if not torch.compiler.is_compiling() or residual is not None:
            hidden_states = hidden_states.clone()
        elif self.table is None:  # Nothing has made a copy before.
            hidden_states = hidden_states.clone(memory_format=torch.contiguous_format)
        torch.ops.vllm.intervene_rows(
            hidden_states, residual, index, rows, gates, spread
        )
        return hidden_states, residual


def _steered_in_graph(
    hidden_states: torch.Tensor,
    residual: torch.Tensor | None,
    table: torch.Tensor,
    rows: torch.Tensor,
    split: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if residual is not None:
        torch.ops.vllm.steer_rows(residual, table, rows, hidden_states, split)
        return hidden_states, residual
    hidden_states = hidden_states.clone()
    torch.ops.vllm.steer_rows(hidden_states, table, rows, None, split)
    return hidden_states, None


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

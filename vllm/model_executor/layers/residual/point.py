# SPDX-License-Identifier: Apache-2.0
"""What happens at one hook point of one layer: capture, then steer.

Legend: T tokens of the step (padding included), H width of the stream,
S rows of staging memory, V rows of vectors.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from vllm.model_executor.layers.residual.capture_op import Launch
from vllm.model_executor.layers.residual.row_edits import (
    RowEdit,
    apply_edits,
    edited_rows,
)
from vllm.model_executor.layers.residual.split_ops import share


class ResidualTap:
    """The hook point of one layer: persistent tensors that recorded graphs read.

    Both features are optional. All arguments that differ between layers are
    tensors, so that equal subgraphs stay equal for the compile cache.
    """

    def __init__(
        self,
        slots: torch.Tensor | None = None,  # [T], int32, strided: -1 or a staging row
        base: torch.Tensor | None = None,  # [1], int32, to be added to it
        staging: torch.Tensor | None = None,  # [S, H]
        table: torch.Tensor | None = None,  # [V, H]
        rows: torch.Tensor | None = None,  # [>= T], int32: a row of the table
    ) -> None:
        self.slots = slots
        self.base = base
        self.staging = staging
        self.table = table
        self.rows = rows
        self.edits: Sequence[RowEdit] | None = None
        """What the step under way does here beyond adding."""

    def __call__(
        self, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Capture, then intervene; returns the pair that the layer goes on with."""
        return self._visit(hidden_states, residual, partial=False)

    def on_partial(
        self, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `__call__`, for a branch that still waits for its all-reduce.

        Without a residual there is no branch yet: `hidden_states` is the stream.
        """
        partial = residual is not None and get_tensor_model_parallel_world_size() > 1
        return self._visit(hidden_states, residual, partial)

    def on_split(
        self, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `__call__`, where each tensor-parallel rank has its share of the tokens.

        Rows are gathered where the step captures any. A change of the stream needs no
        other rank: each changes the tokens that it has.
        """
        assert hidden_states.dim() == 2, f"split {tuple(hidden_states.shape)}"
        if self.slots is not None:
            torch.ops.vllm.capture_split_rows(
                hidden_states, residual, self.slots, self.base, self.staging
            )
        if self.table is None or self.rows is None:
            return hidden_states, residual
        if torch.compiler.is_compiling():
            return self._steer_in_graph(
                hidden_states, residual, torch.ops.vllm.steer_split_rows
            )
        if self.edits is None and not Launch.wants(self.table):
            return hidden_states, residual
        tokens = share(len(hidden_states))
        part = ResidualTap(table=self.table, rows=self.rows[tokens])
        part.edits = _edits_in(tokens, self.edits or ())
        return part(hidden_states, residual)

    def _visit(
        self, hidden_states: torch.Tensor, residual: torch.Tensor | None, partial: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.slots is not None:
            torch.ops.vllm.capture_rows(
                hidden_states, residual, self.slots, self.base, self.staging, partial
            )
        if self.table is None or self.rows is None:
            return hidden_states, residual
        if torch.compiler.is_compiling():
            return self._steer_in_graph(
                hidden_states, residual, torch.ops.vllm.steer_rows
            )
        if self.edits is not None:
            return self._edit(hidden_states, residual, partial)
        return self._steer(hidden_states, residual)

    def _steer_in_graph(
        self,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
        add: Callable[
            [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], None
        ],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Add each token's vector by an op that launches only if a vector is set.

        The residual takes it where there is one, in place, as the fused norm behind
        it may write it in place too: no copy. While the branch may be a partial
        sum, the residual is the same on all ranks. A stream without a residual may
        be known to the layer by another name: a copy takes the vector, which the
        compiler joins to whatever made the stream.
        """
        assert self.table is not None and self.rows is not None
        if residual is not None:
            add(residual, self.table, self.rows, hidden_states)
            return hidden_states, residual
        hidden_states = hidden_states.clone()
        add(hidden_states, self.table, self.rows, None)
        return hidden_states, None

    def _steer(
        self, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `_steer_in_graph`, in a pass that is not compiled: nothing in place."""
        assert self.table is not None and self.rows is not None
        if not Launch.wants(self.table):
            return hidden_states, residual
        tokens = hidden_states.numel() // hidden_states.shape[-1]
        vectors = self.table.index_select(0, self.rows[:tokens])
        vectors = vectors.view(hidden_states.shape)
        if residual is None:
            return hidden_states + vectors, None
        return hidden_states, residual + vectors

    def _edit(
        self, hidden_states: torch.Tensor, residual: torch.Tensor | None, partial: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Change whole rows: they come out as the branch, with nothing beside it."""
        assert self.edits is not None and self.table is not None
        assert self.rows is not None
        rows = edited_rows(self.edits)
        width = hidden_states.shape[-1]
        branch = hidden_states.reshape(-1, width)[rows]
        if partial:
            branch = tensor_model_parallel_all_reduce(branch)
        stream = branch.float()
        if residual is not None:
            stream = stream + residual.reshape(-1, width)[rows].float()
        added = self.table.index_select(0, self.rows[rows]).float()
        stream = apply_edits(self.edits, rows, stream, added)
        leads = not partial or get_tensor_model_parallel_rank() == 0
        changed, beside = self._steer(hidden_states, residual)
        # A copy in any case: the layer may use what it passed in elsewhere.
        changed = changed.clone()
        changed.view(-1, width)[rows] = stream.to(changed.dtype) if leads else 0.0
        if beside is not None:
            beside = beside.clone()
            beside.view(-1, width)[rows] = 0.0
        return changed, beside


def _edits_in(tokens: slice, edits: Sequence[RowEdit]) -> list[RowEdit] | None:
    """What `edits` do to the tokens of one rank, counted from its first."""
    parts = []
    for edit in edits:
        rows = edit.rows[(edit.rows >= tokens.start) & (edit.rows < tokens.stop)]
        if len(rows):
            parts.append(replace(edit, rows=rows - tokens.start))
    return parts or None

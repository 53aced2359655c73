# SPDX-License-Identifier: Apache-2.0
"""What happens at one hook point of one layer: capture, then steer.

Legend: T tokens of the step (padding included), H width of the stream,
S rows of staging memory, V rows of vectors.
"""

from collections.abc import Callable

import torch

from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.residual import program_op  # noqa: F401  its ops
from vllm.model_executor.layers.residual.capture_op import Launch
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
        index: torch.Tensor | None = None,  # [I], int64: addresses of programs
        program_rows: torch.Tensor | None = None,  # [>= T], int32: a row of the index
        gates: torch.Tensor | None = None,  # [>= T, columns], float32
    ) -> None:
        self.slots = slots
        self.base = base
        self.staging = staging
        self.table = table
        self.rows = rows
        self.index = index
        self.program_rows = program_rows
        self.gates = gates

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
        if torch.compiler.is_compiling():
            hidden_states, residual = self._steer_in_graph(
                hidden_states, residual, torch.ops.vllm.steer_split_rows
            )
        elif self.rows is not None:
            rows = self.rows[share(len(hidden_states))]
            hidden_states, residual = self._steer(hidden_states, residual, rows)
        return self._intervene(hidden_states, residual, None)

    def _visit(
        self, hidden_states: torch.Tensor, residual: torch.Tensor | None, partial: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.slots is not None:
            torch.ops.vllm.capture_rows(
                hidden_states, residual, self.slots, self.base, self.staging, partial
            )
        if torch.compiler.is_compiling():
            hidden_states, residual = self._steer_in_graph(
                hidden_states, residual, torch.ops.vllm.steer_rows
            )
        elif self.rows is not None:
            hidden_states, residual = self._steer(hidden_states, residual, self.rows)
        return self._intervene(hidden_states, residual, partial)

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
        if self.table is None or self.rows is None:
            return hidden_states, residual
        if residual is not None:
            add(residual, self.table, self.rows, hidden_states)
            return hidden_states, residual
        hidden_states = hidden_states.clone()
        add(hidden_states, self.table, self.rows, None)
        return hidden_states, None

    def _steer(
        self,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
        rows: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `_steer_in_graph`, in a pass that is not compiled: nothing in place."""
        assert self.table is not None
        if not Launch.wants(self.table):
            return hidden_states, residual
        tokens = hidden_states.numel() // hidden_states.shape[-1]
        vectors = self.table.index_select(0, rows[:tokens])
        vectors = vectors.view(hidden_states.shape)
        if residual is None:
            return hidden_states + vectors, None
        return hidden_states, residual + vectors

    def _intervene(
        self,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
        partial: bool | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Carry out each token's program; `partial` is None where tokens are split.

        Rows that change become the branch. The layer may use what it passed in
        elsewhere: a copy takes them, which the compiler leaves out where nothing else
        reads the original. What the graph holds as the residual is written in place,
        as additions do it.
        """
        index, rows, gates = self.index, self.program_rows, self.gates
        if index is None or rows is None or gates is None:
            return hidden_states, residual
        if not torch.compiler.is_compiling():
            if not Launch.wants(index):
                return hidden_states, residual
            residual = None if residual is None else residual.clone()
        if residual is not None or not torch.compiler.is_compiling():
            hidden_states = hidden_states.clone()
        if partial is None:
            torch.ops.vllm.intervene_split_rows(
                hidden_states, residual, index, rows, gates
            )
        else:
            torch.ops.vllm.intervene_rows(
                hidden_states, residual, index, rows, gates, partial
            )
        return hidden_states, residual

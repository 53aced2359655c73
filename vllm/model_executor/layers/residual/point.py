# SPDX-License-Identifier: Apache-2.0
"""The tap at one hook point of one layer: capture, steer, capture what results.

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
    """Persistent tensors of one hook point of one layer, read by recorded graphs.

    Capture, added vectors and programs are each optional. Everything that differs
    between layers is a tensor, so that the subgraphs of equal layers stay equal for
    the compile cache.

    Args:
        slots: `[T]` int32, may be strided. The token's staging row, or -1.
        base: `[1]` int32, added to every slot.
        staging: `[S, H]` in the stream's dtype.
        after: as `slots`, of rows that are captured behind the interventions.
        table: `[V, H]` in the stream's dtype; row 0 adds nothing.
        rows: `[>= T]` int32, the row of `table` for each token.
        index: `[I]` int64, addresses of programs.
        program_rows: `[>= T]` int32, the row of `index` for each token.
        gates: `[>= T, columns]` float32.
        records: `[R, RECORD_WORDS]` int32, the beginnings of tokens' programs.

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
        records: torch.Tensor | None = None,  # [R, RECORD_WORDS], int32
        after: torch.Tensor | None = None,  # as slots
    ) -> None:
        self.slots = slots
        self.after = after
        self.base = base
        self.staging = staging
        self.table = table
        self.rows = rows
        self.index = index
        self.program_rows = program_rows
        self.gates = gates
        self.records = records
        self.copies = 0
        """If each tensor-parallel rank has some of a row's numbers: how many ranks have
        the same; 0 if each has the row."""

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
        return self._visit(hidden_states, residual, partial=False)

    def on_partial(
        self, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `__call__`, for a branch that has not been all-reduced yet.

        Without a residual there is no branch yet: `hidden_states` is the stream.
        """
        partial = residual is not None and get_tensor_model_parallel_world_size() > 1
        return self._visit(hidden_states, residual, partial)

    def on_split(
        self, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `__call__`, where tokens are split over the tensor-parallel ranks.

        Rows are all-gathered if the step captures any. Steering needs no
        communication: each rank changes its own tokens.
        """
        assert hidden_states.dim() == 2, f"split {tuple(hidden_states.shape)}"
        self._capture(self.slots, hidden_states, residual, None)
        if torch.compiler.is_compiling():
            hidden_states, residual = self._steer_in_graph(
                hidden_states, residual, torch.ops.vllm.steer_split_rows
            )
        elif self.rows is not None:
            rows = self.rows[share(len(hidden_states))]
            hidden_states, residual = self._steer(hidden_states, residual, rows)
        hidden_states, residual = self._intervene(hidden_states, residual, None)
        self._capture(self.after, hidden_states, residual, None)
        return hidden_states, residual

    def _visit(
        self, hidden_states: torch.Tensor, residual: torch.Tensor | None, partial: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        self._capture(self.slots, hidden_states, residual, partial)
        if torch.compiler.is_compiling():
            hidden_states, residual = self._steer_in_graph(
                hidden_states, residual, torch.ops.vllm.steer_rows
            )
        elif self.rows is not None:
            hidden_states, residual = self._steer(hidden_states, residual, self.rows)
        hidden_states, residual = self._intervene(hidden_states, residual, partial)
        self._capture(self.after, hidden_states, residual, partial)
        return hidden_states, residual

    def _capture(
        self,
        slots: torch.Tensor | None,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
        partial: bool | None,
    ) -> None:
        """Copy rows to staging; `partial` is None if tokens are split over ranks."""
        if slots is None:
            return
        base, staging = self.base, self.staging
        if self.copies:
            torch.ops.vllm.capture_divided_rows(
                hidden_states, residual, slots, base, staging, self.copies
            )
        elif partial is None:
            torch.ops.vllm.capture_split_rows(
                hidden_states, residual, slots, base, staging
            )
        else:
            torch.ops.vllm.capture_rows(
                hidden_states, residual, slots, base, staging, partial
            )

    def _steer_in_graph(
        self,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
        add: Callable[
            [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], None
        ],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Add each token's vector by an op that launches only if a vector is set.

        With a residual the vector is added to it in place, without a copy: the
        following fused norm may write it in place too, and unlike the branch it is
        never a partial sum. Without a residual the layer may hold another reference to
        the stream, so a copy is changed; the compiler fuses the copy into the kernel
        that produces the stream.
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
        """As `_steer_in_graph`, out of place, for a pass that is not compiled."""
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
        """Run each token's program; `partial` is None if tokens are split over ranks.

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
        if self.copies:
            torch.ops.vllm.intervene_divided_rows(
                hidden_states, index, rows, gates, self.copies, self.records
            )
        elif partial is None:
            torch.ops.vllm.intervene_split_rows(
                hidden_states, residual, index, rows, gates, self.records
            )
        else:
            torch.ops.vllm.intervene_rows(
                hidden_states, residual, index, rows, gates, partial, self.records
            )
        return hidden_states, residual

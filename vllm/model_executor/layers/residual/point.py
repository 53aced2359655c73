# SPDX-License-Identifier: Apache-2.0
"""The tap at one hook point of one layer: capture, steer, capture what results.

Legend: T tokens of the step (padding included), H width of the stream,
S rows of staging memory, V rows of vectors.
"""

from dataclasses import dataclass, field

import torch

from vllm.distributed import get_tensor_model_parallel_world_size
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

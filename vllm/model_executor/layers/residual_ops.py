# SPDX-License-Identifier: Apache-2.0
"""What happens at one hook point of one layer: copy rows out, change rows.

Legend: T tokens of the step (padding included), H width of the stream,
S rows of staging memory, V rows of vectors.
"""

from collections.abc import Sequence

import torch

from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from vllm.model_executor.layers.residual_edits import (
    RowEdit,
    apply_edits,
    edited_rows,
)
from vllm.triton_utils import HAS_TRITON, tl, triton
from vllm.utils.torch_utils import direct_register_custom_op


class Launch:
    """Which taps launch in the forward pass under way, by their slots' addresses.

    Set by the runner's adapter before each pass, read while a pass runs eagerly
    or is recorded as a graph; replaying a graph does what was recorded. Engine
    thread only.
    """

    taps: frozenset[int] = frozenset()
    families: tuple[frozenset[int], ...] = (frozenset(),)
    """What a recorded graph may launch: nothing first, everything last."""


class ResidualTap:
    """The hook point of one layer: persistent tensors that recorded graphs read.

    Both features are optional. All arguments that differ between layers are
    tensors, so that equal subgraphs stay equal for the compile cache.
    """

    def __init__(
        self,
        slots: torch.Tensor | None = None,  # [T], int32, strided: -1 or a staging row
        staging: torch.Tensor | None = None,  # [S, H]
        table: torch.Tensor | None = None,  # [V, H]
        rows: torch.Tensor | None = None,  # [>= T], int32: a row of the table
    ) -> None:
        self.slots = slots
        self.staging = staging
        self.table = table
        self.rows = rows
        self.steers = False
        """Whether the step under way adds anything here. Host side: a pass that is
        neither compiled nor recorded skips the addition otherwise."""
        self.edits: Sequence[RowEdit] | None = None
        """What the step under way does here beyond adding."""

    def __call__(
        self, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Capture, then intervene; returns the pair that the layer goes on with."""
        if self.slots is not None:
            torch.ops.vllm.capture_rows(
                hidden_states, residual, self.slots, self.staging, False
            )
        if not torch.compiler.is_compiling() and self.edits is not None:
            return self._edit(hidden_states, residual, partial=False)
        return self._steer(hidden_states, residual)

    def on_partial(
        self, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `__call__`, for a branch that still waits for its all-reduce.

        Without a residual there is no branch yet: `hidden_states` is the stream.
        """
        if residual is None or get_tensor_model_parallel_world_size() == 1:
            return self(hidden_states, residual)
        if self.slots is not None:
            torch.ops.vllm.capture_rows(
                hidden_states, residual, self.slots, self.staging, True
            )
        if not torch.compiler.is_compiling() and self.edits is not None:
            return self._edit(hidden_states, residual, partial=True)
        return self._steer(hidden_states, residual)

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

    def _steer(
        self, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Add each token's vector: plain code, which the compiler fuses.

        The residual takes it where there is one. Added to the branch it would be
        drawn into the matrix product before it, which costs a kernel; and while
        the branch may be a partial sum, the residual is the same on all ranks.
        """
        if self.table is None or self.rows is None:
            return hidden_states, residual
        if not _is_recorded(hidden_states) and not self.steers:
            return hidden_states, residual
        tokens = hidden_states.numel() // hidden_states.shape[-1]
        vectors = self.table.index_select(0, self.rows[:tokens])
        vectors = vectors.view(hidden_states.shape)
        if residual is None:
            return hidden_states + vectors, None
        return hidden_states, residual + vectors


def _is_recorded(hidden_states: torch.Tensor) -> bool:
    """Whether what runs now will be run again, on other steps' data."""
    if torch.compiler.is_compiling():
        return True
    return hidden_states.is_cuda and torch.cuda.is_current_stream_capturing()


if HAS_TRITON:

    @triton.jit
    def _capture_rows_kernel(  # type: ignore[no-untyped-def]
        hidden_ptr,  # [T, H]
        residual_ptr,  # [T, H] or unused
        slots_ptr,  # [T]
        staging_ptr,  # [S, H]
        hidden_stride,
        residual_stride,
        slots_stride,
        staging_stride,
        width,
        HAS_RESIDUAL: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        token = tl.program_id(0)
        slot = tl.load(slots_ptr + token * slots_stride).to(tl.int64)
        if slot < 0:
            return
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            mask = column < width
            row = tl.load(hidden_ptr + token * hidden_stride + column, mask=mask)
            if HAS_RESIDUAL:
                # Summed and rounded as the next fused add-norm does it.
                other = tl.load(
                    residual_ptr + token * residual_stride + column, mask=mask
                )
                row = (row.to(tl.float32) + other.to(tl.float32)).to(row.dtype)
            tl.store(staging_ptr + slot * staging_stride + column, row, mask=mask)


def capture_rows(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    slots: torch.Tensor,
    staging: torch.Tensor,
    partial: bool,
) -> None:
    """Copy the rows that have a slot to staging: `staging[slots[t]] = stream[t]`.

    Args:
        hidden: `[T, H]` (or `[1, T, H]`), the stream, or one half of the pair.
        residual: the other half, or None.
        slots: `[>= T]` int32, -1 where the token's row is not wanted.
        staging: `[S, H]` in the stream's dtype.
        partial: `hidden` is this rank's part of a sum over tensor-parallel ranks.

    """
    if slots.data_ptr() not in Launch.taps:
        return
    if partial:
        # All ranks launch alike, so all of them come here. The layer goes on with
        # its own part: only the copy is summed.
        hidden = tensor_model_parallel_all_reduce(hidden)
    if hidden.dim() > 2:
        hidden = hidden.flatten(0, -2)
        residual = None if residual is None else residual.flatten(0, -2)
    if hidden.is_cuda:
        assert hidden.stride(-1) == 1 and staging.stride(-1) == 1
        num_tokens, width = hidden.shape
        _capture_rows_kernel[(num_tokens,)](
            hidden,
            residual,
            slots,
            staging,
            hidden.stride(0),
            0 if residual is None else residual.stride(0),
            slots.stride(0),
            staging.stride(0),
            width,
            HAS_RESIDUAL=residual is not None,
            BLOCK=min(triton.next_power_of_2(width), 4096),
            num_warps=8,
        )
        return
    slots = slots[: hidden.shape[0]]
    tokens = (slots >= 0).nonzero().squeeze(1)
    rows = hidden[tokens]
    if residual is not None:
        rows = rows + residual[tokens]
    staging[slots[tokens].long()] = rows.to(staging.dtype)


def _capture_rows_fake(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    slots: torch.Tensor,
    staging: torch.Tensor,
    partial: bool,
) -> None:
    return None


direct_register_custom_op(
    op_name="capture_rows",
    op_func=capture_rows,
    mutates_args=["staging"],
    fake_impl=_capture_rows_fake,
)

# SPDX-License-Identifier: Apache-2.0
"""The ops of a hook point where each tensor-parallel rank has its share of the tokens.

Of T tokens rank r has C = ceil(T / ranks), from number r * C on. What is behind the
last token is padding: no slot and no vector is ever set for it.
"""

import torch

from vllm.distributed import (
    get_tensor_model_parallel_rank,
    tensor_model_parallel_all_gather,
)
from vllm.model_executor.layers.residual.capture_op import Launch, capture_rows
from vllm.model_executor.layers.residual.steer_op import steer_rows, steer_rows_fake
from vllm.utils.torch_utils import direct_register_custom_op


def share(num_rows: int) -> slice:
    """Which tokens of the step this rank has, where each rank has `num_rows`."""
    start = get_tensor_model_parallel_rank() * num_rows
    return slice(start, start + num_rows)


def capture_split_rows(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    slots: torch.Tensor,
    base: torch.Tensor,
    staging: torch.Tensor,
) -> None:
    """Copy rows that have a slot to staging, whichever rank has them.

    Every rank calls it, since all ranks launch alike.

    Args:
        hidden: `[C, H]`, this rank's share of the stream, or one half of the pair.
        residual: the other half, or None.
        slots: `[T]` or longer, int32, as `capture_rows` has it.
        base: `[1]` int32.
        staging: `[S, H]` in the stream's dtype.

    """
    if not Launch.wants(slots):
        return
    # The sum is rounded here as the next fused add-norm rounds it.
    stream = hidden if residual is None else hidden + residual
    whole = tensor_model_parallel_all_gather(stream.contiguous(), 0)
    # Padding may reach beyond the slots, which are as many as a batch has tokens.
    capture_rows(whole[: len(slots)], None, slots, base, staging, False)


def _capture_split_rows_fake(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    slots: torch.Tensor,
    base: torch.Tensor,
    staging: torch.Tensor,
) -> None:
    return None


direct_register_custom_op(
    op_name="capture_split_rows",
    op_func=capture_split_rows,
    mutates_args=["staging"],
    fake_impl=_capture_split_rows_fake,
)


def steer_split_rows(
    target: torch.Tensor,
    table: torch.Tensor,
    rows: torch.Tensor,
    branch: torch.Tensor | None,
) -> None:
    """Add to each token of this rank its vector, in place, as `steer_rows` does.

    Args:
        target: `[C, H]`, this rank's share of the stream, or one half of the pair.
        table: `[V, H]` in the stream's dtype; row 0 adds nothing.
        rows: int32, a row of the table for each token of all ranks, and for padding.
        branch: the other half, as `steer_rows` has it.

    """
    if not Launch.wants(table):
        return
    steer_rows(target, table, rows[share(len(target))], branch)


direct_register_custom_op(
    op_name="steer_split_rows",
    op_func=steer_split_rows,
    mutates_args=["target"],
    fake_impl=steer_rows_fake,
)

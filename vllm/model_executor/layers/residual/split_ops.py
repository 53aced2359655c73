# SPDX-License-Identifier: Apache-2.0
"""Hook-point ops where tensor-parallel ranks have some of the tokens, or of a row.

Of T tokens, rank r has the C = ceil(T / ranks) tokens from r * C on. Rows after the
last token are padding, for which no slot and no vector is ever set. Other letters are
those of `point.py`.
"""

import torch

from vllm.distributed import (
    get_tensor_model_parallel_rank,
    tensor_model_parallel_all_gather,
)
from vllm.model_executor.layers.residual.capture_op import (
    Launch,
    capture_rows,
    register_op,
)
from vllm.model_executor.layers.residual.steer_op import steer_rows


def share(num_rows: int) -> slice:
    """The tokens of the step that this rank has, if each rank has `num_rows`."""
    start = get_tensor_model_parallel_rank() * num_rows
    return slice(start, start + num_rows)


def capture_split_rows(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    slots: torch.Tensor,
    base: torch.Tensor,
    staging: torch.Tensor,
) -> None:
    """All-gather the stream, then copy rows that have a slot to staging.

    All ranks launch the same ops, so all of them take part.

    Args:
        hidden: `[C, H]`, this rank's share of the stream or of one half of the pair.
        residual: the other half, or None.
        slots: `[>= T]` int32, -1 for a token whose row is not captured.
        base: `[1]` int32.
        staging: `[S, H]` in the stream's dtype.

    """
    if not Launch.wants(slots):
        return
    # The next fused add-norm rounds the sum in the same way.
    stream = hidden if residual is None else hidden + residual
    whole = tensor_model_parallel_all_gather(stream.contiguous(), 0)
    # With padding there may be more rows than slots.
    capture_rows(whole[: len(slots)], None, slots, base, staging, False)


register_op(capture_split_rows, ["staging"])


def gathered(part: torch.Tensor, copies: int) -> torch.Tensor:
    """All-gather the parts of rows.

    Args:
        part: `[T, W]` or `[1, T, W]`, the numbers of each row that this rank has.
        copies: the number of consecutive ranks that have the same numbers.

    Returns:
        `[T, ranks * W / copies]`, whole rows in memory of their own.

    """
    rows = part.reshape(-1, part.shape[-1]).contiguous()
    whole = tensor_model_parallel_all_gather(rows, -1)
    if copies == 1:
        return whole
    return whole.unflatten(-1, (-1, copies, rows.shape[-1]))[:, :, 0].flatten(1)


def capture_divided_rows(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    slots: torch.Tensor,
    base: torch.Tensor,
    staging: torch.Tensor,
    copies: int,
) -> None:
    """All-gather the parts of rows, then copy rows that have a slot to staging.

    Args:
        hidden: `[T, W]` or `[1, T, W]`, the numbers of each row that this rank has.
        residual: None; there is no pair inside a block.
        slots: as in `capture_split_rows`.
        base: likewise.
        staging: likewise.
        copies: the number of consecutive ranks that have the same numbers.

    """
    if not Launch.wants(slots):
        return
    capture_rows(gathered(hidden, copies), None, slots, base, staging, False)


register_op(capture_divided_rows, ["staging"])


def steer_split_rows(
    target: torch.Tensor,
    table: torch.Tensor,
    rows: torch.Tensor,
    branch: torch.Tensor | None,
) -> None:
    """As `steer_rows`, for the tokens of this rank.

    Args:
        target: `[C, H]`, this rank's share of the stream or of one half of the pair.
        table: `[V, H]` in the stream's dtype; row 0 adds nothing.
        rows: `[>= ranks * C]` int32, the row of `table` for each token of all ranks.
        branch: the other half; an ordering dependency as in `steer_rows`.

    """
    if not Launch.wants(table):
        return
    steer_rows(target, table, rows[share(len(target))], branch)


register_op(steer_split_rows, ["target"])

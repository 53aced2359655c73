# SPDX-License-Identifier: Apache-2.0
"""How tensor-parallel ranks share the rows at a hook point.

Of T tokens that they split, rank r has the C = ceil(T / ranks) tokens from r * C on.
Rows after the last token are padding, for which no slot and no vector is ever set.
Other letters are those of `point.py`.
"""

import torch

from vllm.distributed import (
    get_tensor_model_parallel_rank,
    tensor_model_parallel_all_gather,
)

WHOLE = 0
"""Each rank has the rows. A number of 1 or more: each has some numbers of every row,
and as many consecutive ranks have the same."""
SUMMANDS = -1
"""Each rank has a summand of the pair's branch."""
TOKENS = -2
"""Each rank has the rows of some of the tokens."""


def share(num_rows: int) -> slice:
    """The tokens of the step that this rank has, if each rank has `num_rows`."""
    start = get_tensor_model_parallel_rank() * num_rows
    return slice(start, start + num_rows)


def gathered_tokens(
    hidden: torch.Tensor, residual: torch.Tensor | None
) -> torch.Tensor:
    """The stream of all ranks' tokens, `[ranks * C, H]`, in memory of its own."""
    # The next fused add-norm rounds the sum in the same way.
    stream = hidden if residual is None else hidden + residual
    return tensor_model_parallel_all_gather(stream.contiguous(), 0)


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

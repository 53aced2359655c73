# SPDX-License-Identifier: Apache-2.0
"""The custom op of a hook point that executes programs.

It is launched like the additions, only if the step needs it. A kernel finds each
token's program in tables on the device: on a CPU the native library is the kernel.

Legend: T tokens of the step (padding included), H width of the stream.
"""

from collections.abc import Sequence

import torch

from vllm.distributed import (
    get_tensor_model_parallel_rank,
    tensor_model_parallel_all_reduce,
)
from vllm.model_executor.layers.residual.capture_op import (
    Launch,
    begins_early,
    register_op,
)
from vllm.model_executor.layers.residual.host_calls import (
    HostCall,
    HostCalls,
    run_calls,
)
from vllm.model_executor.layers.residual.program_host import execute_programs
from vllm.model_executor.layers.residual.program_kernel import launch_programs
from vllm.model_executor.layers.residual.spread import (
    SUMMANDS,
    TOKENS,
    WHOLE,
    gathered,
    gathered_tokens,
    share,
)


def intervene_rows(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    index: torch.Tensor,
    rows: torch.Tensor,
    gates: torch.Tensor,
    spread: int,
) -> None:
    """Execute each token's program on its row of the stream, in place.

    A changed row is written to the branch, and the residual becomes zeros there; other
    rows keep every bit.

    Args:
        hidden: `[T, H]` (or `[1, T, H]`), the stream, or the pair's branch; `[C, H]` if
            ranks split the tokens, `[T, W]` if each has some numbers of a row.
        residual: the pair's other half, or None.
        index: `[rows]` int64, the address of the program of each row, or 0.
        rows: `[>= T]` int32, a row of the index for each token of all ranks.
        gates: `[>= T, columns]` float32, which probes write and instructions read.
        spread: how ranks share the rows, see `spread.py`.

    """
    if Launch.wants(index):
        intervene_wanted(hidden, residual, index, rows, gates, spread)


def intervene_wanted(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    index: torch.Tensor,
    rows: torch.Tensor,
    gates: torch.Tensor,
    spread: int,
) -> None:
    """`intervene_rows` in a step that runs programs at the hook point."""
    if hidden.is_cpu and spread == WHOLE and not HostCalls.at:
        # The usual case there, without the code that the others need.
        execute_programs(hidden, hidden, residual, index, rows, gates)
        return
    if spread > WHOLE:  # Every rank computes whole rows, and decides conditions alike.
        whole = gathered(hidden, spread)
        intervene_wanted(whole, None, index, rows, gates, WHOLE)
        width = hidden.shape[-1]
        start = get_tensor_model_parallel_rank() // spread * width
        hidden.copy_(whole[:, start : start + width].view(hidden.shape))
        return
    whole, leads, first = hidden, True, 0
    if spread == SUMMANDS:
        # The layer continues with its own part, so a copy is summed.
        whole = tensor_model_parallel_all_reduce(hidden.clone())
        leads = get_tensor_model_parallel_rank() == 0
    elif spread == TOKENS:
        first = share(len(hidden)).start
    _execute(whole, hidden, residual, index, rows, gates, leads, first)
    calls = HostCalls.at.get(index.data_ptr()) if HostCalls.at else None
    if not calls:
        return
    if spread == TOKENS:
        _call_for_all_ranks(calls, hidden, residual)
        return
    if spread == SUMMANDS:  # Programs have changed this rank's part only.
        whole = tensor_model_parallel_all_reduce(hidden.clone())
    width = hidden.shape[-1]
    branch = hidden.view(-1, width)
    whole = branch if spread == WHOLE else whole.view(-1, width)
    other = None if residual is None else residual.view(-1, width)
    run_calls(calls, whole, branch, other, leads)


def _execute(
    whole: torch.Tensor,
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    index: torch.Tensor,
    rows: torch.Tensor,
    gates: torch.Tensor,
    leads: bool,
    first: int,
) -> None:
    if hidden.dim() > 2:
        width = hidden.shape[-1]
        whole, hidden = whole.view(-1, width), hidden.view(-1, width)
        residual = None if residual is None else residual.view(-1, width)
    if first:  # A slice of everything would take longer than a token's program.
        rows, gates = rows[first:], gates[first:]
    tables = whole, hidden, residual, index, rows, gates
    if hidden.is_cuda:
        launch_programs(*tables, leads=leads, early=begins_early(), first=first)
    else:
        execute_programs(*tables, leads=leads, first=first)


def _call_for_all_ranks(
    calls: Sequence[HostCall], hidden: torch.Tensor, residual: torch.Tensor | None
) -> None:
    """Call functions on the rows of all ranks, and keep this rank's `[C, H]`."""
    whole = gathered_tokens(hidden, residual)
    before = whole.clone()
    run_calls(calls, whole, whole, None, True)
    own = share(len(hidden))
    changed = (whole != before).any(dim=-1)[own]
    hidden[changed] = whole[own][changed]
    if residual is not None:
        residual[changed] = 0.0


register_op(intervene_rows, ["hidden", "residual", "gates"])

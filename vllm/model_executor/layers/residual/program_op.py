# SPDX-License-Identifier: Apache-2.0
"""The custom op of a hook point that executes programs.

It is launched like the additions, only if the step needs it. A kernel finds each
token's program in tables on the device: on a CPU the native library is the kernel.

Legend: T tokens of the step (padding included), H width of the stream.
"""

import torch

from vllm.distributed import (
    get_tensor_model_parallel_rank,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)
from vllm.model_executor.layers.residual.capture_op import (
    Launch,
    begins_early,
    register_op,
)
from vllm.model_executor.layers.residual.host_calls import HostCalls, run_calls
from vllm.model_executor.layers.residual.program_host import (
    execute_all,
    execute_programs,
)
from vllm.model_executor.layers.residual.program_kernel import launch_programs
from vllm.model_executor.layers.residual.split_ops import gathered, share


def intervene_rows(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    index: torch.Tensor,
    rows: torch.Tensor,
    gates: torch.Tensor,
    partial: bool,
    records: torch.Tensor | None = None,
) -> None:
    """Execute each token's program on its row of the stream, in place.

    A changed row is written to the branch, and the residual becomes zeros there; other
    rows keep every bit.

    Args:
        hidden: `[T, H]` (or `[1, T, H]`), the stream, or the pair's branch.
        residual: the pair's other half, or None.
        index: `[rows]` int64, the address of the program of each row, or 0.
        rows: `[>= T]` int32, a row of the index for each token.
        gates: `[>= T, columns]` float32, which probes write and instructions read.
        partial: whether `hidden` is this rank's part of a sum over tensor-parallel
            ranks.
        records: `[R, RECORD_WORDS]` int32, the beginnings of the programs of the first
            R tokens, as they are before a recorded step of at most R tokens; None if
            there are none.

    """
    if Launch.wants(index):
        intervene_wanted(hidden, residual, index, rows, gates, partial, records)


def intervene_wanted(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    index: torch.Tensor,
    rows: torch.Tensor,
    gates: torch.Tensor,
    partial: bool,
    records: torch.Tensor | None = None,
) -> None:
    """`intervene_rows` in a step that runs programs at the hook point."""
    usual = hidden.is_cpu and not partial and not HostCalls.at
    if usual and execute_all(hidden, residual, index, rows, gates):
        return
    whole, leads = hidden, True
    if partial:
        # The layer continues with its own part, so a copy is summed.
        whole = tensor_model_parallel_all_reduce(hidden.clone())
        leads = get_tensor_model_parallel_rank() == 0
    _intervene(whole, hidden, residual, index, rows, gates, records, leads, 0)
    if HostCalls.at and (calls := HostCalls.at.get(index.data_ptr())):
        if partial:  # Programs have changed this rank's part only.
            whole = tensor_model_parallel_all_reduce(hidden.clone())
        width = hidden.shape[-1]
        other = None if residual is None else residual.view(-1, width)
        branch = hidden.view(-1, width)
        whole = whole.view(-1, width) if partial else branch
        run_calls(calls, whole, branch, other, leads)


def _intervene(
    whole: torch.Tensor,
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    index: torch.Tensor,
    rows: torch.Tensor,
    gates: torch.Tensor,
    records: torch.Tensor | None,
    leads: bool,
    first: int,
) -> None:
    if hidden.dim() > 2:
        width = hidden.shape[-1]
        whole, hidden = whole.view(-1, width), hidden.view(-1, width)
        residual = None if residual is None else residual.view(-1, width)
    own = gates
    if first:  # A slice of everything would take longer than a token's program.
        rows, own = rows[first:], gates[first:]
    tables = whole, hidden, residual, index, rows, own
    if hidden.is_cuda:
        beginnings = _of_step(records, first, len(hidden))
        early = begins_early()
        launch_programs(*tables, beginnings, leads=leads, early=early, first=first)
    else:
        execute_programs(*tables, leads=leads, first=first)


def _of_step(
    records: torch.Tensor | None, first: int, num_tokens: int
) -> torch.Tensor | None:
    """The records of the tokens from `first` on; None if they are not written.

    They are written before steps that are recorded whole.
    """
    if records is None or not Launch.whole or first + num_tokens > len(records):
        return None
    return records[first:]


register_op(intervene_rows, ["hidden", "residual", "gates"])


def intervene_split_rows(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    index: torch.Tensor,
    rows: torch.Tensor,
    gates: torch.Tensor,
    records: torch.Tensor | None = None,
) -> None:
    """As `intervene_rows`, if each tensor-parallel rank has a share of the tokens.

    Args:
        hidden: `[C, H]`, this rank's share of the stream, or of the pair's branch.
        residual: the pair's other half, or None.
        index: `[rows]` int64, as in `intervene_rows`.
        rows: the row of the index for each token of all ranks, padding included.
        gates: the gates of each token of all ranks, padding included.
        records: those of the first tokens of all ranks, or None.

    """
    if not Launch.wants(index):
        return
    own = share(len(hidden))
    _intervene(hidden, hidden, residual, index, rows, gates, records, True, own.start)
    if calls := HostCalls.at.get(index.data_ptr()):
        # All ranks call the functions, on the rows of all.
        stream = hidden if residual is None else hidden + residual
        whole = tensor_model_parallel_all_gather(stream, 0)
        before = whole.clone()
        run_calls(calls, whole, whole, None, True)
        changed = (whole != before).any(dim=-1)[own]
        hidden[changed] = whole[own][changed]
        if residual is not None:
            residual[changed] = 0.0


register_op(intervene_split_rows, ["hidden", "residual", "gates"])


def intervene_divided_rows(
    hidden: torch.Tensor,
    index: torch.Tensor,
    rows: torch.Tensor,
    gates: torch.Tensor,
    copies: int,
    records: torch.Tensor | None = None,
) -> None:
    """As `intervene_rows`, if each tensor-parallel rank has some numbers of each row.

    Every rank computes whole rows, and so decides conditions alike.

    Args:
        hidden: `[T, W]` or `[1, T, W]`, this rank's numbers.
        index: as in `intervene_rows`.
        rows: likewise.
        gates: likewise.
        copies: the number of consecutive ranks that have the same numbers.
        records: as in `intervene_rows`.

    """
    if not Launch.wants(index):
        return
    whole = gathered(hidden, copies)
    intervene_wanted(whole, None, index, rows, gates, False, records)
    width = hidden.shape[-1]
    start = get_tensor_model_parallel_rank() // copies * width
    hidden.copy_(whole[:, start : start + width].view(hidden.shape))


register_op(intervene_divided_rows, ["hidden", "gates"])

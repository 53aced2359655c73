# SPDX-License-Identifier: Apache-2.0
"""Executes the programs of a hook point on a CPU, by the native library.

One call executes those of all tokens of a step. It reads the same tables as the kernel
of a GPU, so nothing is prepared per layer.

Legend: T tokens of the step (padding included), H width of the stream.
"""

import torch

from vllm.v1.residual.native import DTYPES, NO_ROWS, Library, Rows, library


def execute_all(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    index: torch.Tensor,
    rows: torch.Tensor,
    gates: torch.Tensor,
) -> bool:
    """Execute each token's program on contiguous rows, the usual case, at least cost.

    Between two hook points a CPU's caches are filled with weights, so a call costs what
    the Python code and objects that it touches take to load: there are as few as
    possible.

    Args:
        hidden: `[T, H]` (or `[1, T, H]`), the whole stream, or the pair's branch.
        residual: the pair's other half, or None.
        index: as in `execute_programs`.
        rows: as in `execute_programs`.
        gates: as in `execute_programs`.

    Returns:
        Whether this is that case; otherwise nothing was done.

    """
    if not (hidden.is_contiguous() and gates.is_contiguous()):
        return False
    other = NO_ROWS
    width = hidden.shape[-1]
    if residual is not None:
        if not residual.is_contiguous():
            return False
        other = residual.data_ptr(), width
    columns, num_tokens = gates.shape[-1], hidden.numel() // width
    assert rows.numel() >= num_tokens, "rows of tokens are missing"
    assert gates.numel() >= num_tokens * columns, "gates of tokens are missing"
    branch = hidden.data_ptr(), width
    _native().run_programs(
        branch,
        branch,
        other,
        (gates.data_ptr(), columns),
        index.data_ptr(),
        rows.data_ptr(),
        num_tokens,
        width,
        0,
        DTYPES[hidden.dtype],
        True,
    )
    return True


def execute_programs(
    source: torch.Tensor,
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    index: torch.Tensor,
    rows: torch.Tensor,
    gates: torch.Tensor,
    *,
    leads: bool = True,
    first: int = 0,
) -> None:
    """Execute each token's program, in place; arguments as of `launch_programs`."""
    num_tokens, width = hidden.shape
    assert len(rows) >= num_tokens <= len(gates), "rows or gates of tokens are missing"
    branch = _rows(hidden)
    _native().run_programs(
        branch if source is hidden else _rows(source),
        branch,
        NO_ROWS if residual is None else _rows(residual),
        _rows(gates),
        index.data_ptr(),
        rows.data_ptr(),
        num_tokens,
        width,
        first,
        DTYPES[hidden.dtype],
        leads,
    )


def _native() -> Library:
    native = library()
    assert native is not None, "steering was enabled without the native library"
    return native


def _rows(tensor: torch.Tensor) -> Rows:
    apart, between = tensor.stride()
    assert between == 1, "rows must be contiguous"
    return tensor.data_ptr(), apart

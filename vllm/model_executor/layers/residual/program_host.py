# SPDX-License-Identifier: Apache-2.0
"""Executes the programs of a hook point on a CPU, by the native library.

One call executes those of all tokens of a step. It reads the same tables as the kernel
of a GPU, so nothing is prepared per layer. Without the library, `program.py` computes.

Legend: T tokens of the step (padding included), H width of the stream.
"""

import torch

from vllm.v1.residual.native import DTYPES, NO_ROWS, Rows, library


def reads_tables(device: torch.device) -> bool:
    """Whether programs are executed from tables of addresses on a device."""
    return device.type != "cpu" or library() is not None


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
    native = library()
    assert native is not None, "the native library is missing"
    num_tokens, width = hidden.shape
    assert len(rows) >= num_tokens <= len(gates), "rows or gates of tokens are missing"
    branch = _rows(hidden)
    native.run_programs(
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


def _rows(tensor: torch.Tensor) -> Rows:
    apart, between = tensor.stride()
    assert between == 1, "rows must be contiguous"
    return tensor.data_ptr(), apart

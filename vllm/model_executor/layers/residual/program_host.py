# SPDX-License-Identifier: Apache-2.0
"""Executes the programs of a hook point on a CPU, by the native library.

One call executes those of all tokens of a step. It reads the same tables as the kernel
of a GPU, so nothing is prepared per layer.

Legend: T tokens of the step (padding included), H width of the stream.
"""

import torch

from vllm.v1.residual.native import DTYPES, NO_ROWS, Library, Rows, library


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
    """Execute each token's program, in place; arguments as of `launch_programs`.

    The stream's tensors may be `[1, T, H]` too; gates are contiguous. Between two hook
    points a CPU's caches are filled with weights, so a call costs what the Python code
    and objects that it touches take to load: there are as few as possible.
    """
    width = hidden.shape[-1]
    num_tokens = hidden.numel() // width
    columns = gates.shape[-1]
    assert rows.numel() >= num_tokens, "rows of tokens are missing"
    assert gates.numel() >= num_tokens * columns, "gates of tokens are missing"
    branch = _rows(hidden)
    _native().run_programs(
        branch if source is hidden else _rows(source),
        branch,
        NO_ROWS if residual is None else _rows(residual),
        (gates.data_ptr(), columns),
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
    if tensor.is_contiguous():  # Takes less than the strides.
        return tensor.data_ptr(), tensor.shape[-1]
    assert tensor.stride(-1) == 1, "rows must be contiguous"
    return tensor.data_ptr(), tensor.stride(-2)

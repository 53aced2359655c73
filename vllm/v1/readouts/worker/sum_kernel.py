# SPDX-License-Identifier: Apache-2.0
"""The kernel that sums the rows of prompts in staging memory.

Gain, with steps of prompts as large as upstream's (8B class, H100, mean rows of
4,096-token prompts, `benchmarks/NOTES.md`): throughput 0.976 instead of 0.964 in one
engine. Of 800 ms, sums take 3.

Legend: S rows of staging memory, N spans of rows, H width.
"""

import numpy as np
import torch

from vllm.triton_utils import HAS_TRITON, tl, triton
from vllm.utils.torch_utils import async_tensor_h2d

BLOCK_ROWS, BLOCK_WIDTH = 32, 128
"""Rows and columns that a program adds at a time."""
PROGRAMS = 2048
"""So many programs read memory as fast as it can be read."""
LEAST_ROWS = 256
"""Fewest rows of a program."""


def sums(rows: torch.Tensor, spans: np.ndarray) -> torch.Tensor:
    """The sum of the rows of each span, `[N, H]` float32.

    Args:
        rows: `[S, H]`, on the device.
        spans: `[2, N]` int64: first row and number of rows of each span.

    """
    (count, width), longest = (spans.shape[1], rows.shape[1]), int(spans[1].max())
    columns = triton.cdiv(width, BLOCK_WIDTH)
    # Each part of a span has a program; parts are added in order, so bits stay equal.
    parts = min(
        triton.cdiv(PROGRAMS, count * columns), triton.cdiv(longest, LEAST_ROWS)
    )
    out = rows.new_empty(parts, count, width, dtype=torch.float32)
    _sum_kernel[(columns, count, parts)](
        rows,
        async_tensor_h2d(spans, device=rows.device),
        out,
        count,
        width,
        rows.stride(0),
        BLOCK_ROWS=BLOCK_ROWS,
        BLOCK_WIDTH=BLOCK_WIDTH,
    )
    return out[0] if parts == 1 else out.sum(dim=0)


def compile_kernel(rows: torch.Tensor) -> None:
    """Compile the kernel, so that no step of other requests waits for it.

    Args:
        rows: `[S, H]`, staging memory, which is read.

    """
    sums(rows, np.array([[0], [1]]))


if HAS_TRITON:

    @triton.jit(do_not_specialize=["count"])
    def _sum_kernel(  # type: ignore[no-untyped-def]
        rows_ptr,  # [S, H]
        spans_ptr,  # [2, N], int64
        out_ptr,  # [parts, N, H], float32
        count,
        width,
        stride,  # of the rows
        BLOCK_ROWS: tl.constexpr,
        BLOCK_WIDTH: tl.constexpr,
    ):
        column = tl.program_id(0) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
        span, part = tl.program_id(1), tl.program_id(2)
        inside = column < width
        first = tl.load(spans_ptr + span)
        length = tl.load(spans_ptr + count + span)
        each = tl.cdiv(length, tl.num_programs(2))
        start = part * each
        stop = tl.minimum(start + each, length)
        total = tl.zeros((BLOCK_ROWS, BLOCK_WIDTH), tl.float32)
        for done in range(start, stop, BLOCK_ROWS):
            row = done + tl.arange(0, BLOCK_ROWS)
            total += tl.load(
                rows_ptr + (first + row)[:, None] * stride + column[None, :],
                mask=(row < stop)[:, None] & inside[None, :],
                other=0.0,
            ).to(tl.float32)
        place = (part * count + span).to(tl.int64) * width
        tl.store(out_ptr + place + column, tl.sum(total, axis=0), mask=inside)

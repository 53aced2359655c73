# SPDX-License-Identifier: Apache-2.0
"""Detects rows with NaN or infinity and zeroes them before sampling.

Uses a single kernel launch, without synchronizing with the device.
"""

import torch

from vllm.triton_utils import HAS_TRITON, tl, triton

BLOCK = 4096

if HAS_TRITON:

    @triton.jit
    def _nonfinite_rows_kernel(  # type: ignore[no-untyped-def]
        hidden_ptr,  # [T, H]
        rows_ptr,  # [L]
        firsts_ptr,  # [R]
        counts_ptr,  # [R]
        stride,
        width,
        BLOCK: tl.constexpr,
    ):
        request = tl.program_id(0)
        row = tl.load(rows_ptr + tl.load(firsts_ptr + request)).to(tl.int64)
        count = 0
        for start in range(0, width, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            place = hidden_ptr + row * stride + columns
            numbers = tl.load(place, mask=columns < width, other=0.0).to(tl.float32)
            # x - x is NaN for NaN and infinity.
            count += tl.sum((numbers - numbers != 0.0).to(tl.int32))
        tl.store(counts_ptr + request, count)
        if count > 0:
            for start in range(0, width, BLOCK):
                columns = start + tl.arange(0, BLOCK)
                place = hidden_ptr + row * stride + columns
                tl.store(place, 0.0, mask=columns < width)


def clear_nonfinite_rows(
    hidden: torch.Tensor, rows: torch.Tensor, firsts: torch.Tensor
) -> torch.Tensor:
    """Count the non-finite values in each request's row, and zero rows that have any.

    Samplers do not support NaN.

    Args:
        hidden: `[T, H]`, the output of the last layer; changed in place.
        rows: `[L]`, the rows of which logits are computed.
        firsts: `[R]`, for each request the index of its first row in `rows`.

    Returns:
        The counts, `[R]` int32.

    """
    if not hidden.is_cuda:
        chosen = rows[firsts.long()].long()
        counts = (~hidden[chosen].isfinite()).sum(-1, dtype=torch.int32)
        hidden[chosen[counts > 0]] = 0.0
        return counts
    counts = torch.empty(firsts.shape[0], dtype=torch.int32, device=hidden.device)
    _nonfinite_rows_kernel[(firsts.shape[0],)](
        hidden, rows, firsts, counts, hidden.stride(0), hidden.shape[-1], BLOCK=BLOCK
    )
    return counts

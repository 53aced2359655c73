# SPDX-License-Identifier: Apache-2.0
"""Rows that are not finite, found and taken out before anything is sampled of them.

In one launch, and without waiting for the device.
"""

import torch

from vllm.triton_utils import HAS_TRITON, tl, triton

BLOCK = 4096

if HAS_TRITON:

    @triton.jit
    def _lost_rows_kernel(  # type: ignore[no-untyped-def]
        hidden_ptr,  # [T, H]
        rows_ptr,  # [L]
        firsts_ptr,  # [R]
        lost_ptr,  # [R]
        stride,
        width,
        BLOCK: tl.constexpr,
    ):
        request = tl.program_id(0)
        row = tl.load(rows_ptr + tl.load(firsts_ptr + request)).to(tl.int64)
        lost = 0
        for start in range(0, width, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            place = hidden_ptr + row * stride + columns
            numbers = tl.load(place, mask=columns < width, other=0.0).to(tl.float32)
            # NaN and infinity less themselves are NaN.
            lost += tl.sum((numbers - numbers != 0.0).to(tl.int32))
        tl.store(lost_ptr + request, lost)
        if lost > 0:
            for start in range(0, width, BLOCK):
                columns = start + tl.arange(0, BLOCK)
                place = hidden_ptr + row * stride + columns
                tl.store(place, 0.0, mask=columns < width)


def clear_lost_rows(
    hidden: torch.Tensor, rows: torch.Tensor, firsts: torch.Tensor
) -> torch.Tensor:
    """How many numbers of each request's row are not finite `[R]` int32.

    Such a row becomes zeros: samplers are not made for NaN.

    Args:
        hidden: `[T, H]`, what the last layer gives.
        rows: `[L]`, the rows that logits are computed of.
        firsts: `[R]`, by request the first of its places in `rows`.

    """
    if not hidden.is_cuda:
        chosen = rows[firsts.long()].long()
        counts: torch.Tensor = (~hidden[chosen].isfinite()).sum(-1, dtype=torch.int32)
        hidden[chosen[counts > 0]] = 0.0
        return counts
    lost = torch.empty(firsts.shape[0], dtype=torch.int32, device=hidden.device)
    _lost_rows_kernel[(firsts.shape[0],)](
        hidden, rows, firsts, lost, hidden.stride(0), hidden.shape[-1], BLOCK=BLOCK
    )
    return lost

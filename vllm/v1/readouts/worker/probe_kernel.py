# SPDX-License-Identifier: Apache-2.0
"""The kernel that computes probes from rows of staging memory, in one launch.

A probe's arithmetic takes the GPU less time than a launch, and as calls of torch it has
up to eight: gather, conversion, product, sum, bias, activation, copy to the host. Here
each value is computed from its row and written once, to memory of the device or to
pinned memory of the host. Its bits do not depend on the other rows.

Legend: S rows of staging memory, R rows of a job, K vectors of a probe, H width.
"""

import torch

from vllm.triton_utils import HAS_TRITON, tl, triton
from vllm.v1.readouts.modules import ProbeModule

MOST_ROWS = 256
"""Most rows for which the kernel is used; a matrix product is faster for more."""
ELEMENTWISE = ("none", "relu", "sigmoid", "jumprelu")
"""The activations that the kernel computes, by number."""
WARPS = 8


def serves(module: ProbeModule, num_rows: int) -> bool:
    """Whether the kernel exists here and can compute a probe for `num_rows` rows."""
    return HAS_TRITON and suits(module.activation, module.cosine, num_rows)


def suits(activation: str, cosine: bool, num_rows: int) -> bool:
    """Whether the kernel can compute such a probe for `num_rows` rows."""
    return activation in ELEMENTWISE and not cosine and num_rows <= MOST_ROWS


def probe_rows(
    module: ProbeModule, rows: torch.Tensor, index: torch.Tensor, out: torch.Tensor
) -> None:
    """Write `activation(rows[index] @ vectors.T + bias)` to `out`, in float32.

    Args:
        module: a probe that `serves` accepts, with `vectors` `[K, H]` and `bias` `[K]`;
            or one probe for each of the R rows, `[R, K, H]` and `[R, K]`.
        rows: `[S, H]`, on the device.
        index: `[R]` int64, on the device.
        out: `[R, K]` float32, on the device or in pinned memory of the host.

    """
    num_rows, count = out.shape
    own, width = module.vectors.dim() == 3, rows.shape[1]
    of_rows, of_vectors, of_width = _blocks(count, width, own)
    grid = triton.cdiv(num_rows, of_rows), triton.cdiv(count, of_vectors)
    _probe_kernel[grid](
        rows,
        index,
        module.vectors,
        module.bias,
        module.bias if module.threshold is None else module.threshold,
        out,
        num_rows,
        count,
        width,
        rows.stride(0),
        ELEMENTWISE.index(module.activation),
        OWN=own,
        BLOCK_R=of_rows,
        BLOCK_K=of_vectors,
        BLOCK_H=of_width,
        num_warps=WARPS,
    )


def compile_kernels(rows: torch.Tensor) -> None:
    """Compile all variants, so that no step of other requests waits for it.

    Args:
        rows: `[S, H]`, staging memory, which is read.

    """
    index = torch.zeros(2, dtype=torch.int64, device=rows.device)
    vectors = torch.zeros(4, rows.shape[1], device=rows.device)
    bias = torch.zeros(2, 2, device=rows.device)
    for module, count in (
        (ProbeModule(vectors=vectors[:1], bias=bias[0, :1]), 1),
        (ProbeModule(vectors=vectors[:2], bias=bias[0]), 2),
        (ProbeModule(vectors=vectors.unflatten(0, (2, 2)), bias=bias), 2),
    ):
        out = torch.empty(2, count, device=rows.device)
        probe_rows(module, rows, index, out)


def _blocks(count: int, width: int, own: bool) -> tuple[int, int, int]:
    """Rows, vectors and columns of a program.

    They do not depend on the number of rows, on which the bits must not depend.
    """
    # The fastest for 32 rows of width 4096 and 1, 64 or 256 vectors on an H100: 9, 11
    # and 17 us, where calls of torch took 26, 37 and 38.
    if count == 1 or own:
        return 1, 1, min(triton.next_power_of_2(width), 4096)
    return 4, 8, min(triton.next_power_of_2(width), 512)


if HAS_TRITON:

    @triton.jit(do_not_specialize=["num_rows", "count", "activation"])
    def _probe_kernel(  # type: ignore[no-untyped-def]
        rows_ptr,  # [S, H]
        index_ptr,  # [R], int64
        vectors_ptr,  # [K, H], or [R, K, H] with OWN
        bias_ptr,  # [K], or [R, K] with OWN
        threshold_ptr,  # [K], read for jumprelu only
        out_ptr,  # [R, K]
        num_rows,
        count,
        width,
        stride,  # of the rows
        activation,  # index in `ELEMENTWISE`
        OWN: tl.constexpr,
        BLOCK_R: tl.constexpr,
        BLOCK_K: tl.constexpr,
        BLOCK_H: tl.constexpr,
    ):
        row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
        vector = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
        is_row, is_vector = row < num_rows, vector < count
        is_value = is_row[:, None] & is_vector[None, :]
        place = tl.load(index_ptr + row, mask=is_row, other=0)
        first = vector[None, :]  # Index of each value's vector and bias.
        is_first = is_vector[None, :]
        if OWN:
            first = row[:, None] * count + vector[None, :]
            is_first = is_value
        start = first.to(tl.int64) * width
        dots = tl.zeros((BLOCK_R, BLOCK_K, BLOCK_H), tl.float32)
        for done in range(0, width, BLOCK_H):
            column = done + tl.arange(0, BLOCK_H)
            inside = column < width
            x = tl.load(
                rows_ptr + place[:, None] * stride + column[None, :],
                mask=is_row[:, None] & inside[None, :],
                other=0.0,
            ).to(tl.float32)
            v = tl.load(
                vectors_ptr + start[:, :, None] + column[None, None, :],
                mask=is_first[:, :, None] & inside[None, None, :],
                other=0.0,
            )
            dots += x[:, None, :] * v  # Summed over the width only at the end.
        values = tl.sum(dots, axis=2)
        values += tl.load(bias_ptr + first, mask=is_first, other=0.0)
        if activation == 1:
            values = tl.where(values <= 0.0, 0.0, values)  # NaN stays.
        if activation == 2:
            values = 1.0 / (1.0 + tl.exp(-values))
        if activation == 3:
            threshold = tl.load(threshold_ptr + vector, mask=is_vector, other=0.0)
            values = tl.where(values > threshold[None, :], values, 0.0)
        tl.store(
            out_ptr + row[:, None] * count + vector[None, :], values, mask=is_value
        )

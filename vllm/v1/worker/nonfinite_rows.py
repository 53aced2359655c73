# SPDX-License-Identifier: Apache-2.0
"""Detects rows with NaN or infinity and zeroes them before sampling.

Uses a single kernel launch, without synchronizing with the device. When that has
happened, the layers whose input was not finite are found from a request's keys and
values.
"""

import re
from collections.abc import Iterator
from typing import Any

import torch

from vllm.triton_utils import HAS_TRITON, tl, triton
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.residual.nonfinite_streams import BlockIds, Finiteness

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


BLOCKS_AT_ONCE = 64
"""Number of blocks that are checked at a time, which bounds temporary memory."""


def layer_finiteness(worker: Any, block_ids: BlockIds) -> Finiteness:
    """For `collective_rpc`: classify this rank's layers by the request's KV cache.

    Args:
        worker: the worker whose layers are checked.
        block_ids: the request's KV cache blocks, by group of layers.

    Returns:
        The layers with only finite keys and values, and the other layers.

    """
    met: dict[bool, set[int]] = {True: set(), False: set()}
    for layer, rows in _kept(worker.model_runner, block_ids):
        finite = all(
            bool(part.float().isfinite().all()) for part in rows.split(BLOCKS_AT_ONCE)
        )
        met[finite].add(layer)
    return Finiteness(sorted(met[True] - met[False]), sorted(met[False]))


def _kept(runner: Any, block_ids: BlockIds) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield layers with the content of the request's blocks `[blocks, ...]`."""
    config = runner.kv_cache_config
    modules = runner.compilation_config.static_forward_context
    for group, blocks in zip(config.kv_cache_groups, block_ids, strict=True):
        if not isinstance(group.kv_cache_spec, AttentionSpec):
            continue
        for name in group.layer_names:
            index = re.search(r"\.(\d+)\.", name)
            cache = modules[name].kv_cache
            if index is None or not isinstance(cache, torch.Tensor):
                continue
            rows = _rows(cache, config.num_blocks, blocks)
            if rows is not None:
                yield int(index[1]), rows


def _rows(
    cache: torch.Tensor, num_blocks: int, blocks: list[int]
) -> torch.Tensor | None:
    """The content of the blocks in a layer's cache; None if it is not of floats."""
    if cache.dtype == torch.uint8:
        cache = cache.view(torch.float8_e4m3fn)
    if not cache.is_floating_point():
        return None
    # A block may correspond to several blocks of the kernels. Block 0 is a placeholder
    # for blocks that a sliding window has freed.
    ratio = cache.shape[0] // num_blocks
    owned = torch.tensor([block for block in blocks if block], dtype=torch.long)
    of_kernel = owned[:, None] * ratio + torch.arange(ratio)
    return cache[of_kernel.flatten().to(cache.device)]

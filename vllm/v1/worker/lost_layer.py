# SPDX-License-Identifier: Apache-2.0
"""Which layers were given a stream that was not finite, from their keys and values."""

import re
from collections.abc import Iterator
from typing import Any

import torch

from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.residual.lost_streams import BlockIds, Met

BLOCKS_AT_ONCE = 64
"""Bounds the memory that looking takes."""


def layers_met(worker: Any, block_ids: BlockIds) -> Met:
    """For `collective_rpc`: this rank's layers, by what a request left in them.

    Args:
        worker: whose layers are looked at.
        block_ids: the request's blocks, by group of layers.

    """
    met: dict[bool, set[int]] = {True: set(), False: set()}
    for layer, rows in _kept(worker.model_runner, block_ids):
        finite = all(
            bool(part.float().isfinite().all()) for part in rows.split(BLOCKS_AT_ONCE)
        )
        met[finite].add(layer)
    return Met(sorted(met[True] - met[False]), sorted(met[False]))


def _kept(runner: Any, block_ids: BlockIds) -> Iterator[tuple[int, torch.Tensor]]:
    """Layers with their share of the request's blocks `[blocks, ...]`."""
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
    """A layer's memory of these blocks; None where it holds no numbers as such."""
    if cache.dtype == torch.uint8:
        cache = cache.view(torch.float8_e4m3fn)
    if not cache.is_floating_point():
        return None
    # A block may be several to the kernels. The first one stands for those that a
    # sliding window has left.
    ratio = cache.shape[0] // num_blocks
    owned = torch.tensor([block for block in blocks if block], dtype=torch.long)
    of_kernel = owned[:, None] * ratio + torch.arange(ratio)
    return cache[of_kernel.flatten().to(cache.device)]

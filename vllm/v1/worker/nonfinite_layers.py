# SPDX-License-Identifier: Apache-2.0
"""Finds the layers whose input was not finite, from a request's keys and values."""

import re
from collections.abc import Iterator
from typing import Any

import torch

from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.residual.nonfinite_streams import BlockIds, Finiteness

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

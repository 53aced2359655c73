# SPDX-License-Identifier: Apache-2.0
"""Reads the keys of tokens from the paged KV cache, as attention backends keep them.

Without it patterns would need the keys of all earlier tokens staged anew: those of a
prefix-cache hit or an earlier chunk are only there.
"""

from collections.abc import Sequence
from typing import Any

import torch

from vllm import _custom_ops as ops
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionType

CPU = "CPU_ATTN"
KNOWN = (CPU, "FLASH_ATTN", "TRITON_ATTN")
"""Backends whose cache `[blocks, KV heads, block size, 2 * head size]` is understood.

That on CPUs orders the keys of a block for its instructions, the others by token.
"""
FLOATS = ("auto", "float16", "bfloat16", "float32")
FP8 = ("fp8", "fp8_e4m3", "fp8_e5m2")
BASE = 8
"""Digits below it are exact in every dtype of a cache."""


def why_unread(core: Any) -> str:
    """Why patterns of an attention layer are not computed; empty if they are."""
    backend = core.attn_backend.get_name()
    if type(core) is not Attention or core.attn_type != AttentionType.DECODER:
        return f"{type(core).__name__} does not read all earlier tokens of its request"
    if backend not in KNOWN:
        return (
            f"the layout of the KV cache of {backend} is not known; choose one of "
            f"{list(KNOWN)} with --attention-backend"
        )
    if core.kv_cache_dtype not in (*FLOATS, *FP8):
        return (
            f"keys of --kv-cache-dtype {core.kv_cache_dtype} are not read; use auto or "
            "fp8"
        )
    if core.use_mm_prefix:
        return "tokens of an image attend to later ones of it"
    if core.use_alibi_sqrt or getattr(core.impl, "chunk_lookback", -1) > -1:
        return "its mask or its bias is one that only its own kernel knows"
    return ""


class KeyCache:
    """The keys of attention layers. Engine thread only."""

    def __init__(self) -> None:
        self._orders: dict[tuple[Any, ...], torch.Tensor] = {}
        """By layout of a cache on a CPU: where the numbers of its keys are."""

    def read(
        self, cores: Sequence[Any], blocks: torch.Tensor, heads: torch.Tensor
    ) -> torch.Tensor:
        """The keys of some heads of layers whose caches are alike.

        Args:
            cores: the attention layers; `why_unread` is empty.
            blocks: `[n]`, on the device.
            heads: KV heads `[h]`, on the device; may repeat.

        Returns:
            `[l * h, n * block size, head_size]` float32, scaled as attention scales
            them.

        """
        where = blocks.long()[:, None], heads
        block, size = cores[0].kv_cache.shape[2], cores[0].head_size
        shape = len(cores), len(heads), len(blocks), block, size
        keys = torch.empty(*shape, device=blocks.device)
        for own, core in zip(keys, cores):
            own.copy_(self._part(core, where).transpose(0, 1))
            if core.kv_cache_dtype in FP8:
                own.mul_(_scale(core, heads))
        return keys.view(-1, len(blocks) * block, size)

    def _part(
        self, core: Any, where: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """Keys as they are kept, `[n, h, block size, head_size]`."""
        cache, size = core.kv_cache, core.head_size
        count, kv_heads, block, _ = cache.shape
        if core.attn_backend.get_name() == CPU:
            flat = cache.view(count, kv_heads, -1)[..., : block * size]
            part = flat[where][..., self._order(core, block)].unflatten(-1, (block, -1))
        else:
            part = cache[..., :size][where]
        return part.view(_fp8(core)) if core.kv_cache_dtype in FP8 else part

    def _order(self, core: Any, block: int) -> torch.Tensor:
        """`[block * head_size]`: where in a block the keys' numbers are, by token.

        Found by writing numbered keys as attention does: the order depends on the
        processor.
        """
        place = core.isa, block, core.head_size, core.kv_cache_dtype, core.dtype
        if place not in self._orders:
            self._orders[place] = _order_of(core, block)
        return self._orders[place]


def _order_of(core: Any, block: int) -> torch.Tensor:
    size = core.head_size
    numbers = torch.arange(block * size).view(block, 1, size)
    found = torch.zeros(block * size, dtype=torch.long)
    power = 1
    while power < block * size:
        digit = (numbers // power % BASE).to(core.dtype)
        found += power * _stored(core, digit).long()
        power *= BASE
    order = found.argsort()
    if not torch.equal(found[order], torch.arange(block * size)):
        raise ValueError("the order of keys in the KV cache of this CPU is not known")
    return order


def _stored(core: Any, keys: torch.Tensor) -> torch.Tensor:
    """How the cache keeps the keys `[block, 1, head_size]` of a block, flat."""
    block, _, size = keys.shape
    cache = torch.zeros(1, 1, 2 * block, size, dtype=core.kv_cache.dtype)
    key_cache, value_cache = cache.chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(
        keys,
        keys,
        key_cache,
        value_cache,
        torch.arange(block),
        core.isa,
        kv_cache_dtype=core.kv_cache_dtype,
    )
    kept = key_cache.reshape(-1)
    return (kept.view(_fp8(core)) if core.kv_cache_dtype in FP8 else kept).float()


def _fp8(core: Any) -> torch.dtype:
    is_e5m2 = core.kv_cache_dtype == "fp8_e5m2"
    return torch.float8_e5m2 if is_e5m2 else current_platform.fp8_dtype()


def _scale(core: Any, heads: torch.Tensor) -> torch.Tensor:
    """The scale of the keys, of each head where there are several."""
    scale: torch.Tensor = core._k_scale.flatten()
    return scale[heads][:, None, None, None] if len(scale) > 1 else scale

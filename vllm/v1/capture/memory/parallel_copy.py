# SPDX-License-Identifier: Apache-2.0
"""Copying rows on the host, large amounts on several threads.

One core copies a few GB/s, less than a prompt's rows come in; upstream leaves torch
one thread while it serves. A copy lets go of the interpreter's lock, as each call of
torch does: the engine's thread is held up less by one long wait of another thread than
by many short ones, so what can be a single call is one.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeAlias

import torch

from vllm.utils.math_utils import cdiv
from vllm.utils.torch_utils import available_cpu_count

MOST_THREADS = 6
PIECE_BYTES = 2 << 20
"""What is worth waking a thread for."""

Copy: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""A target and its source, of equal shapes, `[..., hidden_size]`."""


def copy_all(copies: Sequence[Copy]) -> None:
    """Do them all.

    Each thread makes a single call: between two calls the interpreter's lock would
    change hands, and the engine's thread would wait for it each time.
    """
    total = sum([target.nbytes for target, _ in copies])
    count = threads_for(total)
    if count < 2:
        _copy_some(copies)
        return
    first, *others = shares(copies, cdiv(total, count))
    futures = [_pool().submit(_copy_some, share) for share in others]
    _copy_some(first)
    for future in futures:
        future.result()


def shares(copies: Sequence[Copy], size: int) -> list[list[Copy]]:
    """The copies in parts of about `size` bytes; a larger copy is cut."""
    parts: list[list[Copy]] = []
    left = 0
    for copy in copies:
        for piece in [copy] if copy[0].nbytes <= size else cut(copy, size):
            if left <= 0:
                parts.append([])
                left = size
            parts[-1].append(piece)
            left -= piece[0].nbytes
    return parts


def cut(copy: Copy, size: int) -> list[Copy]:
    """A copy in pieces of at most `size` bytes, if one of its rows is not larger."""
    target, source = copy
    lengths = target.shape[:-1]
    axis = max(range(len(lengths)), key=lengths.__getitem__)
    pieces = min(cdiv(target.nbytes, size), lengths[axis])
    return list(
        zip(target.tensor_split(pieces, axis), source.tensor_split(pieces, axis))
    )


def _copy_some(copies: Sequence[Copy]) -> None:
    if copies:
        targets, sources = zip(*copies)
        torch._foreach_copy_(targets, sources)


def threads_for(num_bytes: int) -> int:
    """How many threads are worth waking for a copy."""
    return max(1, min(num_threads(), num_bytes // PIECE_BYTES))


@cache
def num_threads() -> int:
    """How many threads copy at once: a quarter of the cores that there are."""
    return max(1, min(MOST_THREADS, available_cpu_count() // 4))


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads() - 1, "capture-copy")

# SPDX-License-Identifier: Apache-2.0
"""Copying rows on the host, large amounts on several threads.

One core copies a few GB/s, less than a prompt's rows come in; upstream leaves torch
one thread while it serves. Copies let go of the interpreter's lock; what is done
between them is NumPy's, which keeps it, as it is held up less by one long wait of
another thread than by many short ones.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from vllm.utils.math_utils import cdiv
from vllm.utils.torch_utils import available_cpu_count

MOST_THREADS = 6
PIECE_BYTES = 2 << 20
"""What is worth waking a thread for."""

Bytes = npt.NDArray[np.uint8]


def bytes_of(rows: torch.Tensor) -> Bytes:
    """The memory of `[..., width]`, in which each row is contiguous, as bytes."""
    found: Bytes = rows.detach().view(torch.uint8).numpy()
    return found


def copy_all(pairs: Sequence[tuple[Bytes, Bytes]]) -> None:
    """`target[:] = source` for pairs of equal shapes, `[..., bytes of a row]`.

    Each thread makes a single call: between two calls the interpreter's lock would
    change hands, and the engine's thread would wait for it each time.
    """
    total = sum(target.nbytes for target, _ in pairs)
    count = min(num_threads(), total // PIECE_BYTES)
    if count < 2:
        _copy_some(pairs)
        return
    first, *others = shares(pairs, cdiv(total, count))
    futures = [_pool().submit(_copy_some, share) for share in others]
    _copy_some(first)
    for future in futures:
        future.result()


def shares(
    pairs: Sequence[tuple[Bytes, Bytes]], size: int
) -> list[list[tuple[Bytes, Bytes]]]:
    """The pairs in parts of about `size` bytes; a larger pair is cut."""
    parts: list[list[tuple[Bytes, Bytes]]] = []
    left = 0
    for target, source in pairs:
        axis = int(np.argmax(target.shape[:-1]))
        cuts = min(cdiv(target.nbytes, size), target.shape[axis])
        for piece in zip(
            np.array_split(target, cuts, axis), np.array_split(source, cuts, axis)
        ):
            if left <= 0:
                parts.append([])
                left = size
            parts[-1].append(piece)
            left -= piece[0].nbytes
    return parts


def _copy_some(pairs: Sequence[tuple[Bytes, Bytes]]) -> None:
    if pairs:
        targets = [torch.from_numpy(target) for target, _ in pairs]
        sources = [torch.from_numpy(source) for _, source in pairs]
        torch._foreach_copy_(targets, sources)


@cache
def num_threads() -> int:
    """How many threads copy at once: a quarter of the cores that there are."""
    return max(1, min(MOST_THREADS, available_cpu_count() // 4))


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads() - 1, "capture-copy")

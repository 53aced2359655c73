# SPDX-License-Identifier: Apache-2.0
"""Copying rows on the host, large amounts on several threads.

One core copies a few GB/s, less than a prompt's rows come in; upstream leaves torch
one thread while it serves. Copies let go of the interpreter's lock; what is done
between them is NumPy's, which keeps it, as it is held up less by one long wait of
another thread than by many short ones.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

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
    """`target[:] = source` for each pair of equal shapes.

    The small ones in one call: between two calls the interpreter's lock would change
    hands, and the engine's thread would wait for it each time.
    """
    small = [pair for pair in pairs if pair[0].nbytes < 2 * PIECE_BYTES]
    if small:
        targets = [torch.from_numpy(target) for target, _ in small]
        sources = [torch.from_numpy(source) for _, source in small]
        torch._foreach_copy_(targets, sources)
    for target, source in pairs:
        if target.nbytes >= 2 * PIECE_BYTES:
            copy_rows(target, source)


def copy_rows(target: Bytes, source: Bytes) -> None:
    """`target[:] = source`, equal shapes `[..., bytes of a row]`."""
    pieces = min(num_threads(), target.nbytes // PIECE_BYTES)
    if pieces < 2:
        np.copyto(target, source)
        return
    axis = int(np.argmax(target.shape[:-1]))
    parts = zip(
        np.array_split(target, pieces, axis), np.array_split(source, pieces, axis)
    )
    first, *others = parts
    futures: list[Future[Any]] = [_pool().submit(np.copyto, *part) for part in others]
    np.copyto(*first)
    for future in futures:
        future.result()


@cache
def num_threads() -> int:
    """How many threads copy at once: a quarter of the cores that there are."""
    return max(1, min(MOST_THREADS, available_cpu_count() // 4))


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads() - 1, "capture-copy")

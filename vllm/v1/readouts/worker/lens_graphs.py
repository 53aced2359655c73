# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of what a lens computes.

Where the host launches no faster than the GPU computes, one launch in place of some ten
is what a step gains. With four H200s (8B) lenses of one and of eight of 32 requests
left 0.78 and 0.72 of upstream's throughput without graphs, and 0.90 and 0.86 with them
on another four (medians; `benchmarks/NOTES.md` has the turns, which vary). On one H200,
for 16 requests of a model with eight layers of the 8B width, whose host is the limit as
that of a pipeline stage is, a step with a lens takes 0.94 of the time without. Where
the GPU is the limit, as for all layers of the 8B, they gain nothing.
"""

from collections import Counter
from collections.abc import Callable
from typing import TypeAlias

import torch

from vllm.logger import init_logger

logger = init_logger(__name__)

MOST_ROWS = 512
"""Rows of the largest graph. With more, the device takes longer than the host."""
MOST_GRAPHS = 32
USES = 8
"""The use of a kind of lens for which its graph is recorded."""

Kind: TypeAlias = tuple[int, int]
"""Number of rows and of likeliest tokens."""
Compute: TypeAlias = Callable[[torch.Tensor, int, tuple[int, ...]], torch.Tensor]
"""Of rows `[n, hidden_size]`, `top_k`, and further tokens: `[ranks, n, numbers]`."""


class LensGraphs:
    """Records what is computed of rows, and replays it with other rows.

    Ranks that compute a lens together record at the same call, and exchange as many
    rows whether they could record or not.
    """

    def __init__(self, compute: Compute, rows: torch.Tensor) -> None:
        """Start without graphs.

        Args:
            compute: what is recorded, on the stream that is current then.
            rows: `[S, hidden_size]`, what graphs read.

        """
        self._compute = compute
        self._rows = rows
        self._pool: tuple[int, int] | None = None
        self._uses: Counter[Kind] = Counter()
        self._graphs: dict[Kind, tuple[torch.cuda.CUDAGraph, torch.Tensor] | None] = {}
        """None if it could not be recorded."""

    def __call__(
        self, rows: torch.Tensor, top_k: int, tokens: tuple[int, ...]
    ) -> torch.Tensor:
        """What is computed of rows; without a graph if there are further tokens."""
        count = len(rows)
        kind = padded(count), top_k
        if tokens or (kind not in self._graphs and not self._is_due(kind)):
            return self._compute(rows, top_k, tokens)
        read = self._rows[: kind[0]]
        if rows.data_ptr() != read.data_ptr():
            read[:count] = rows
        if kind not in self._graphs:
            self._graphs[kind] = self._recorded(kind)
        recorded = self._graphs[kind]
        if recorded is None:
            return self._compute(read, top_k, ())[:, :count]
        graph, found = recorded
        graph.replay()
        return found[:, :count].clone()

    def _is_due(self, kind: Kind) -> bool:
        """Whether a graph is to be recorded now."""
        if kind[0] > len(self._rows) or len(self._graphs) == MOST_GRAPHS:
            return False
        self._uses[kind] += 1
        return self._uses[kind] == USES

    def _recorded(self, kind: Kind) -> tuple[torch.cuda.CUDAGraph, torch.Tensor] | None:
        size, top_k = kind
        try:
            graph = torch.cuda.CUDAGraph()
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            with torch.cuda.graph(
                graph,
                self._pool,  # type: ignore[arg-type]
                stream=torch.cuda.current_stream(),
                # Other threads wait for events of earlier steps meanwhile.
                capture_error_mode="thread_local",
            ):
                found = self._compute(self._rows[:size], top_k, ())
        except Exception:
            logger.exception("A lens is computed without a CUDA graph")
            return None
        return graph, found


def padded(count: int) -> int:
    """The rows of the graph for `count` rows: few sizes, none much too large."""
    step = max(16, (1 << (count - 1).bit_length()) // 8)
    return -(-count // step) * step

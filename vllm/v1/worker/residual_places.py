# SPDX-License-Identifier: Apache-2.0
"""Where additions to the stream begin beside other kernels, found by trying.

Additions of a few wide rows take next to no time themselves. But a product some kernels
later may take a tenth longer beside them, by how its blocks happen to fall in with one
another: with the same kernels in the same order a step of 32 layers of width 4096 was
0.975 of a plain one in one process and 1.046 in the next. The place where additions
begin changes that, and which place is the better one is not known before. So the graphs
of such steps are recorded at both, and the faster one of each pair is kept.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from vllm.logger import init_logger
from vllm.model_executor.layers.residual_additions import Places

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.cudagraph_utils import (
        BatchExecutionDescriptor,
        ModelCudaGraphManager,
    )

logger = init_logger(__name__)

TURNS, REPLAYS = 5, 4
"""Replays of each graph: the least of so many turns of so many. 0.2 s for a graph that
takes 5 ms."""
WORTH = 0.997
"""The time that the other place must save: recordings of one place differ by less."""


def try_places(
    manager: "ModelCudaGraphManager",
    wanted: Iterable["BatchExecutionDescriptor"],
    width: int,
) -> None:
    """Record each graph with additions begun at the other place; keep the faster.

    Between the recording of graphs and the first step: replays compute on what the
    recording left in the inputs.

    Args:
        manager: has the graphs, and a `residual_recorder`.
        wanted: those that add to the stream, and do no more with it.
        width: of the stream.

    """
    told = []
    for descriptor in wanted:
        num_tokens = descriptor.num_tokens
        if not Places.are_two(num_tokens, width):
            continue
        usual, late = manager.graphs[descriptor], Places.late(num_tokens, width)
        Places.found[num_tokens] = not late
        try:
            manager.residual_recorder(descriptor)
            before, after = _compare(usual, manager.graphs[descriptor])
        except Exception:
            logger.exception("The other place of additions could not be tried")
            before, after = 0.0, 1.0
        if after > WORTH * before:
            Places.found[num_tokens] = late
            manager.graphs[descriptor] = usual
        if not before:
            return
        told.append(
            f"{num_tokens} tokens {'late' if Places.found[num_tokens] else 'early'} "
            f"({min(before, after):.3f} ms, else {max(before, after):.3f})"
        )
    if told:
        logger.info("Where additions to the stream begin: %s", "; ".join(told))


def _compare(one: torch.cuda.CUDAGraph, other: torch.cuda.CUDAGraph) -> list[float]:
    """Milliseconds of a replay of each, which take turns."""
    least = [float("inf")] * 2
    for _ in range(TURNS):
        for place, graph in enumerate((one, other)):
            least[place] = min(least[place], _milliseconds(graph))
    return least


def _milliseconds(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    taken: float = begin.elapsed_time(end)
    return taken / REPLAYS

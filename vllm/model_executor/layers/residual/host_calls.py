# SPDX-License-Identifier: Apache-2.0
"""Calls of Python functions at hook points, for single requests of a step.

They run inside the op that executes programs, after the programs. A replayed CUDA graph
would not repeat them, so a step with calls runs without graphs.

Legend: T tokens of the step, H width of the stream.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, NamedTuple

import torch


class HostCall(NamedTuple):
    """A function for the rows of one request."""

    run: Callable[[torch.Tensor], torch.Tensor | None]
    """Takes a copy of the request's rows `[tokens, H]` of the stream; returns the
    changed rows, or None if they are unchanged."""
    start: int
    """First row of the request in the step's tensors."""
    stop: int


class HostCalls:
    """The calls of the current step. Engine thread only."""

    at: ClassVar[Mapping[int, Sequence[HostCall]]] = {}
    """Calls by the address of the hook point's program index."""


def run_calls(
    calls: Sequence[HostCall],
    whole: torch.Tensor,
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    leads: bool,
) -> None:
    """Call functions one after another, and write the rows that they changed.

    As with programs, a changed row is written to the branch, and the residual becomes
    zeros there.

    Args:
        calls: the calls of one hook point.
        whole: `[T, H]`, the stream, or the pair's branch summed over ranks.
        hidden: the same tensor, or this rank's part of that sum.
        residual: `[T, H]`, the pair's other half, or None.
        leads: whether this rank writes the changed rows to its part of the sum.

    """
    for call in calls:
        rows = slice(call.start, call.stop)
        stream = whole[rows].clone()
        if residual is not None:
            stream = (stream.float() + residual[rows].float()).to(whole.dtype)
        changed = call.run(stream)
        if changed is None:
            continue
        whole[rows] = changed
        if hidden is not whole:
            hidden[rows] = changed if leads else 0.0
        if residual is not None:
            residual[rows] = 0.0

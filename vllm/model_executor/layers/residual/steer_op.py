# SPDX-License-Identifier: Apache-2.0
"""The ops that add steering vectors to the stream, in place or ahead of time.

An addition is a tiny kernel, but in a decode step its launch costs time. A vector for
the pair's residual can be added as soon as nothing else reads the residual, while the
branch is still being computed: `steer_rows_ahead` does that on a side stream, and
`steer_rows` then only waits for it.

Legend: T tokens of the step (padding included), H width of the stream, V rows of
vectors.
"""

from collections.abc import Sequence
from functools import cache
from typing import ClassVar

import torch

from vllm.model_executor.layers.residual.capture_op import (
    Launch,
    begins_early,
    block_of,
    register_op,
)
from vllm.model_executor.layers.residual.spread import share
from vllm.triton_utils import HAS_TRITON, tl, triton

Addition = tuple[torch.Tensor, torch.Tensor]
"""A table `[V, H]` and the row of it for each token, `[>= T]`."""

WIDE = 4096
FEW = 64
"""Additions to a stream at least `WIDE` wide start late in steps of 2 to `FEW` tokens.

Step time with all points steered over that of unsteered steps, on H200s, starting
early and late: at width 4096 1.000 and 1.029 for one token, 1.029 and 0.996 for 8,
1.024 and 1.011 for 32, 1.001 and 1.019 for 128. At width 2048 early is better or
within 0.4 %.
"""


class EarlyAdditions:
    """Additions that were started early in the pass being recorded.

    Engine thread only.
    """

    begun: ClassVar[dict[int, "SideStream"]] = {}
    """By address of the table."""

    @classmethod
    def join(cls, table: torch.Tensor) -> bool:
        """Wait for the addition of `table` if it was started; whether it was."""
        beside = cls.begun.pop(table.data_ptr(), None)
        if beside is not None:
            beside.join()
        return beside is not None


if HAS_TRITON:

    @triton.jit
    def _added(value, vector):  # type: ignore[no-untyped-def]
        return (value.to(tl.float32) + vector.to(tl.float32)).to(value.dtype)

    @triton.jit
    def _steer_short_rows_kernel(  # type: ignore[no-untyped-def]
        target_ptr,  # [T, H]
        table_ptr,  # [V, H]
        rows_ptr,  # [T]
        other_table_ptr,  # [V, H] or unused
        other_rows_ptr,  # [T] or unused
        target_stride,
        table_stride,
        other_table_stride,
        width,
        TWICE: tl.constexpr,
        BLOCK: tl.constexpr,
        launch_pdl: tl.constexpr,
    ):
        token = tl.program_id(0)
        column = tl.arange(0, BLOCK)
        mask = column < width
        place = target_ptr + token * target_stride + column
        if not launch_pdl:  # Overlap the load of the stream with that of the vector.
            value = tl.load(place, mask=mask)
        row = tl.load(rows_ptr + token).to(tl.int64)
        vector = tl.load(table_ptr + row * table_stride + column, mask=mask)
        other_row = row
        if TWICE:
            other_row = tl.load(other_rows_ptr + token).to(tl.int64)
            other_ptr = other_table_ptr + other_row * other_table_stride
            other = tl.load(other_ptr + column, mask=mask)
        if launch_pdl:  # The previous kernel may still write the stream.
            # Every block waits: one that exits before the previous kernel has
            # finished would let the next kernel start too early.
            tl.extra.cuda.gdc_wait()
        if (row == 0) & (other_row == 0):
            return
        if launch_pdl:
            value = tl.load(place, mask=mask)
        value = _added(value, vector)
        if TWICE:  # Rounded after each addition, as by two ops.
            value = _added(value, other)
        tl.store(place, value, mask=mask)

    @triton.jit
    def _steer_rows_kernel(  # type: ignore[no-untyped-def]
        target_ptr,
        table_ptr,
        rows_ptr,
        target_stride,
        table_stride,
        width,
        BLOCK: tl.constexpr,
        launch_pdl: tl.constexpr,
    ):
        token = tl.program_id(0)
        row = tl.load(rows_ptr + token).to(tl.int64)
        if launch_pdl:
            tl.extra.cuda.gdc_wait()
        if row == 0:
            return
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            mask = column < width
            place = target_ptr + token * target_stride + column
            vector = tl.load(table_ptr + row * table_stride + column, mask=mask)
            tl.store(place, _added(tl.load(place, mask=mask), vector), mask=mask)


FEW_TOKENS = 512
"""Most tokens of a step whose rows are loaded unconditionally.

In a decode step this hides the latency of one load. In a prefill step with many rows,
few of which may be needed, the extra loads would cost more than that.
"""


def _add(target: torch.Tensor, additions: Sequence[Addition]) -> None:
    """Add the tables' vectors to `[..., H]`; in small steps one kernel adds two tables.

    All points of a 1B-class model steered, over upstream's graph, with loads ahead and
    one kernel for two additions and without either (H100): 0.998 and 1.013 for one
    token, 1.017 and 1.023 for 32, 1.018 and 1.099 for 256.
    """
    target = target.view(-1, target.shape[-1])
    num_tokens, width = target.shape
    if not target.is_cuda:
        for table, rows in additions:
            target.add_(table.index_select(0, rows[:num_tokens]))
    elif num_tokens <= FEW_TOKENS and width <= block_of(width):
        for first in range(0, len(additions), 2):
            _launch_short(target, additions[first], additions[first : first + 2][-1])
    else:
        for table, rows in additions:
            assert target.stride(-1) == table.stride(-1) == 1
            _steer_rows_kernel[(num_tokens,)](
                target,
                table,
                rows,
                target.stride(0),
                table.stride(0),
                width,
                BLOCK=block_of(width),
                num_warps=8,
                launch_pdl=begins_early(),
            )


def _launch_short(target: torch.Tensor, addition: Addition, other: Addition) -> None:
    """Add the vectors of two tables, or of one that is given twice."""
    (table, rows), (other_table, other_rows) = addition, other
    assert target.stride(-1) == table.stride(-1) == other_table.stride(-1) == 1
    num_tokens, width = target.shape
    _steer_short_rows_kernel[(num_tokens,)](
        target,
        table,
        rows,
        other_table,
        other_rows,
        target.stride(0),
        table.stride(0),
        other_table.stride(0),
        width,
        TWICE=other is not addition,
        BLOCK=block_of(width),
        num_warps=8,
        launch_pdl=begins_early(),
    )


def steer_rows(
    target: torch.Tensor,
    table: torch.Tensor,
    rows: torch.Tensor,
    branch: torch.Tensor | None,
    split: bool = False,
) -> None:
    """Add each token's vector in place: `target[t] += table[rows[t]]`.

    If `steer_rows_ahead` has started the addition, wait for it instead.

    Args:
        target: `[T, H]` or `[1, T, H]`, the stream or one half of the pair.
        table: `[V, H]` in the stream's dtype; row 0 adds nothing.
        rows: `[>= T]` int32, the row of `table` for each token.
        branch: the other half, or None. Not read; as an argument it keeps the compiler
            from moving the wait before the work that should overlap the addition.
        split: whether tensor-parallel ranks split the tokens, of which `target` has
            those of this rank, and `rows` those of all.

    """
    if Launch.wants(table) and not EarlyAdditions.join(table):
        _add(target, [(table, rows[share(len(target))] if split else rows)])


register_op(steer_rows, ["target"])


def steer_rows_ahead(
    target: torch.Tensor,
    tables: list[torch.Tensor],
    rows: list[torch.Tensor],
    captured: list[torch.Tensor],
    after: torch.Tensor | None,
    late: bool | None,
) -> None:
    """Start the additions of later `steer_rows` calls, concurrently with other kernels.

    Only if the whole pass is recorded as one graph: otherwise the later calls might not
    run before the recording ends. And only if no capture in between launches, as it
    would read the stream after the addition instead of before.

    Args:
        target: `[T, H]` or `[1, T, H]`, the pair's residual. Only hook-point ops may
            read or write it before those calls.
        tables: `[V, H]` each, in the order of the calls.
        rows: `[>= T]` int32 each.
        captured: the slots of the captures that read `target` in between.
        after: a tensor that must be computed before the additions start; not read.
        late: whether this is the later of two places where the additions may start;
            None if it is the only one.

    """
    if not (Launch.whole and _recording()):
        return
    if late is not None and late != _begins_late(target):
        return
    wanted = [one for one in zip(tables, rows, strict=True) if Launch.wants(one[0])]
    if not wanted or any(Launch.wants(slots) for slots in captured):
        return
    beside = SideStream(target, wanted)
    EarlyAdditions.begun.update({table.data_ptr(): beside for table, _ in wanted})


def _begins_late(target: torch.Tensor) -> bool:
    width = target.shape[-1]
    return width >= WIDE and 1 < target.numel() // width <= FEW


class SideStream:
    """Additions to one residual, running on the side stream."""

    def __init__(self, target: torch.Tensor, additions: Sequence[Addition]) -> None:
        self._done: torch.cuda.Event | None = None
        if not target.is_cuda:
            _add(target, additions)
            return
        stream = _side_stream(target.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            _add(target, additions)
            self._done = stream.record_event()

    def join(self) -> None:
        """Make the current stream wait until the vectors are added."""
        if self._done is not None:
            torch.cuda.current_stream().wait_event(self._done)
            self._done = None


def _recording() -> bool:
    return torch.cuda.is_current_stream_capturing()


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """A CUDA stream that nothing else uses.

    PyTorch hands out streams from a pool of 32 per priority. One of the default
    priority might be the stream that is being recorded, where nothing could overlap.
    """
    return torch.cuda.Stream(device, priority=-1)


register_op(steer_rows_ahead, ["target"])

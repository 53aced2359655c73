# SPDX-License-Identifier: Apache-2.0
"""Which hook-point ops launch in a step, and the op that copies rows to staging.

An op launches a kernel only if the current step needs it. A CUDA graph recorded while
no op launches therefore contains the same kernels as upstream's.

Legend: T tokens of the step (padding included), H width of the stream,
S rows of staging memory.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.model_executor.layers.residual.spread import (
    SUMMANDS,
    TOKENS,
    WHOLE,
    gathered,
    gathered_tokens,
)
from vllm.platforms import current_platform
from vllm.triton_utils import HAS_TRITON, tl, triton
from vllm.utils.torch_utils import direct_register_custom_op

ALIGNMENT = 16
"""Alignment in bytes of every tensor that belongs to a tap.

Code compiled for aligned arguments copies an argument that is not aligned. The op
would then see an address that it does not recognise.
"""

NOBODY = frozenset({0})
"""Launches nothing, but is not empty, so the ops are still called.

No tensor has the address 0.
"""


class Launch:
    """Which ops launch in the current forward pass.

    An op is identified by the address of a tensor that it reads: the tap's slots or
    the tap's table. The runner's adapter sets `taps` before each pass. It is read
    while a pass runs eagerly or is recorded as a CUDA graph; replaying a graph repeats
    what was recorded. Engine thread only.
    """

    taps: frozenset[int] = frozenset()
    known: frozenset[int] | None = None
    """Addresses of all engines that this process has had; None before the first."""
    families: tuple[frozenset[int], ...] = (frozenset(),)
    """The sets of ops for which graphs are recorded.

    Recorded at start-up: the empty set first and the full set last. Sets recorded
    while serving follow.
    """
    whole: bool = False
    """Whether the whole pass is being recorded as one graph.

    An op may then start early, concurrently with other kernels.
    """

    @classmethod
    def begin(cls, idle: frozenset[int], families: tuple[frozenset[int], ...]) -> None:
        """Start a new engine and replace the launch sets of the previous one."""
        cls.taps, cls.families = idle, families
        cls.known = (cls.known or frozenset()).union(*families)

    @classmethod
    def wants(cls, read: torch.Tensor) -> bool:
        """Whether the op that reads this tensor launches in the current pass.

        Raises:
            RuntimeError: the tensor belongs to no engine. Compiled code copies an
                argument whose alignment differs from the one it was compiled for; the
                op would then never launch, and rows would be lost.

        """
        address = read.data_ptr()
        if address in cls.taps:
            return True
        if cls.known is not None and address not in cls.known:
            raise RuntimeError(
                f"a hook point received memory other than its own: {tuple(read.shape)} "
                f"of {read.dtype} at an address with {address % ALIGNMENT} bytes over "
                f"a multiple of {ALIGNMENT}. This is an error of Clearbox, please "
                "report it with the model's name; --enforce-eager avoids it"
            )
        return False


def register_op(op: Callable[..., None], mutates: list[str]) -> None:
    """Register an op that only writes to memory of its arguments.

    Args:
        op: the function; the op has its name.
        mutates: names of the tensors that it writes to.

    """
    direct_register_custom_op(op.__name__, op, mutates, fake_impl=_nothing)


def _nothing(*_args: Any, **_options: Any) -> None:
    """What such an op returns while code is traced."""


class CaptureProgress:
    """How far the captures of a pass have come on the device. Engine thread only.

    The rows of a large step take as long to copy to the host as some of its layers take
    to compute. With this, the first rows are copied while later layers are computed.
    """

    active: "ClassVar[CaptureProgress | None]" = None
    """That of the current pass, if somebody follows it."""

    def __init__(self, num_ops: int, num_parts: int) -> None:
        """Follow a pass.

        Args:
            num_ops: how many capture ops the pass launches.
            num_parts: into how many parts they are divided.

        """
        self._each = -(-num_ops // num_parts)
        self._launched: list[int] = []
        self.parts: list[tuple[tuple[int, ...], torch.cuda.Event]] = []
        """The ops that were launched, by the address that identifies them, and the
        event after which their rows are in staging memory. Ops of replayed graphs and
        the last ones of a pass are missing."""

    def launched(self, address: int) -> None:
        """Note that the op with this address was launched on the current stream."""
        if torch.cuda.is_current_stream_capturing():
            return
        self._launched.append(address)
        if len(self._launched) == self._each:
            event = torch.cuda.Event()
            event.record()
            self.parts.append((tuple(self._launched), event))
            self._launched = []


if HAS_TRITON:

    @triton.jit
    def _capture_rows_kernel(  # type: ignore[no-untyped-def]
        hidden_ptr,  # [T, H]
        residual_ptr,  # [T, H] or unused
        slots_ptr,  # [T]
        base_ptr,  # [1]
        staging_ptr,  # [S, H]
        hidden_stride,
        residual_stride,
        slots_stride,
        staging_stride,
        width,
        HAS_RESIDUAL: tl.constexpr,
        BLOCK: tl.constexpr,
        launch_pdl: tl.constexpr,
    ):
        token = tl.program_id(0)
        base = tl.load(base_ptr)
        slot = tl.load(slots_ptr + token * slots_stride).to(tl.int64)
        if launch_pdl:
            # Every block waits: one that exits before the previous kernel has
            # finished would let the next kernel start too early.
            tl.extra.cuda.gdc_wait()
            # The next kernel may start if it waits for this one in the same way.
            tl.extra.cuda.gdc_launch_dependents()
        if slot < 0:
            return
        hidden_ptr += token * hidden_stride
        residual_ptr += token * residual_stride
        place = staging_ptr + (base + slot) * staging_stride
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            mask = column < width
            row = tl.load(hidden_ptr + column, mask=mask)
            if HAS_RESIDUAL:
                # Sum in float32 and round once, as the next fused add-norm does.
                other = tl.load(residual_ptr + column, mask=mask)
                row = (row.to(tl.float32) + other.to(tl.float32)).to(row.dtype)
            tl.store(place + column, row, mask=mask)


def block_of(width: int) -> int:
    """Columns that a kernel processes at a time: a power of two, at most 4096."""
    return min(triton.next_power_of_2(width), 4096)


def begins_early() -> bool:
    """Whether kernels use CUDA's programmatic dependent launch.

    The kernel then starts while the previous one finishes, loads slots, table rows and
    vectors, and waits before it touches the stream. Those inputs must have been written
    before the graph started, which holds only if the whole pass is one graph.
    """
    return (
        Launch.whole
        and current_platform.is_cuda()
        and current_platform.has_device_capability(90)
    )


def capture_rows(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    slots: torch.Tensor,
    base: torch.Tensor,
    staging: torch.Tensor,
    spread: int,
) -> None:
    """Copy rows that have a slot to staging: `staging[base + slots[t]] = stream[t]`.

    Args:
        hidden: `[T, H]` or `[1, T, H]`, the stream or one half of the pair; `[C, H]` if
            ranks split the tokens, `[T, W]` if each has some numbers of a row.
        residual: the other half, same shape; None if `hidden` is the stream.
        slots: `[>= T]` int32, -1 for a token whose row is not captured.
        base: `[1]` int32, added to every slot. In consecutive decode steps of the same
            requests only this value changes.
        staging: `[S, H]` in the stream's dtype. A row of another width begins where
            its slot does, and ends in a later row or before the end of this one.
        spread: how ranks share the rows, see `spread.py`. All ranks launch the same
            ops, so the collective operations cannot deadlock.

    """
    if not Launch.wants(slots):
        return
    address = slots.data_ptr()
    if spread == SUMMANDS:
        # The layer continues with its own summand, so a copy is reduced; upstream
        # reduces in place on a CPU.
        part = hidden if hidden.is_cuda else hidden.clone()
        hidden = tensor_model_parallel_all_reduce(part)
    elif spread == TOKENS:
        # With padding there may be more rows than slots.
        hidden = gathered_tokens(hidden, residual)[: len(slots)]
        residual = None
    elif spread != WHOLE:
        hidden = gathered(hidden, spread)
    if hidden.dim() > 2:
        hidden = hidden.flatten(0, -2)
        residual = None if residual is None else residual.flatten(0, -2)
    if hidden.is_cuda:
        assert hidden.stride(-1) == 1 and staging.stride(-1) == 1
        num_tokens, width = hidden.shape
        _capture_rows_kernel[(num_tokens,)](
            hidden,
            hidden if residual is None else residual,
            slots,
            base,
            staging,
            hidden.stride(0),
            0 if residual is None else residual.stride(0),
            slots.stride(0),
            staging.stride(0),
            width,
            HAS_RESIDUAL=residual is not None,
            BLOCK=block_of(width),
            num_warps=8,
            launch_pdl=begins_early(),
        )
        if CaptureProgress.active is not None:
            CaptureProgress.active.launched(address)
        return
    slots = slots[: hidden.shape[0]]
    tokens = (slots >= 0).nonzero().squeeze(1)
    rows = hidden[tokens]
    if residual is not None:
        rows = rows + residual[tokens]
    if (width := rows.shape[1]) == staging.shape[1]:
        staging[(base + slots[tokens]).long()] = rows.to(staging.dtype)
        return
    first = (base + slots[tokens]).long()[:, None] * staging.shape[1]
    place = first + torch.arange(width, device=rows.device)
    staging.view(-1)[place] = rows.to(staging.dtype)


register_op(capture_rows, ["staging"])

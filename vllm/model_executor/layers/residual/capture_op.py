# SPDX-License-Identifier: Apache-2.0
"""Which ops of hook points launch, and the op that copies rows out.

An op launches only where the step under way needs it, so that a graph recorded while
nothing launches holds the same kernels as upstream's.

Legend: T tokens of the step (padding included), H width of the stream,
S rows of staging memory.
"""

import torch

from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.platforms import current_platform
from vllm.triton_utils import HAS_TRITON, tl, triton
from vllm.utils.torch_utils import direct_register_custom_op

ALIGNMENT = 16
"""Bytes. Compiled code copies arguments that are not aligned so, if the ones that it
was compiled for were, and an op would not know them again: all of a tap's are."""

NOBODY = frozenset({0})
"""Launches nothing, but has ops called: no tensor has this address."""


class Launch:
    """Which ops launch in the forward pass under way.

    An op is known by the address of what it reads: a tap's slots, a tap's table.
    Set by the runner's adapter before each pass, read while a pass runs eagerly
    or is recorded as a graph; replaying a graph does what was recorded. Engine
    thread only.
    """

    taps: frozenset[int] = frozenset()
    known: frozenset[int] | None = None
    """Those of all engines that the process has had; None where it had none."""
    families: tuple[frozenset[int], ...] = (frozenset(),)
    """What a recorded graph may launch: at the start nothing first and everything
    last, then what is recorded while serving."""
    whole: bool = False
    """The whole pass is being recorded as one graph, in which an op may begin before
    its turn, beside other kernels."""

    @classmethod
    def begin(cls, idle: frozenset[int], families: tuple[frozenset[int], ...]) -> None:
        """An engine begins; what one before it would launch is forgotten."""
        cls.taps, cls.families = idle, families
        cls.known = (cls.known or frozenset()).union(*families)

    @classmethod
    def wants(cls, read: torch.Tensor) -> bool:
        """Whether the op that reads this tensor launches.

        Raises:
            RuntimeError: it is no engine's tensor. Compiled code copies an
                argument that is aligned otherwise than the one it was compiled for;
                the op would never launch, and rows would be lost.

        """
        address = read.data_ptr()
        if address in cls.taps:
            return True
        if cls.known is not None and address not in cls.known:
            raise RuntimeError(
                f"a hook point was given other memory than its own: {tuple(read.shape)}"
                f" of {read.dtype} at an address with {address % ALIGNMENT} bytes over "
                f"a multiple of {ALIGNMENT}. This is an error of Clearbox, please "
                "report it with the model's name; --enforce-eager avoids it"
            )
        return False


if HAS_TRITON:

    @triton.jit
    def _stream_row(  # type: ignore[no-untyped-def]
        hidden_ptr,  # [H]
        residual_ptr,  # [H] or unused
        column,
        width,
        HAS_RESIDUAL: tl.constexpr,
    ):
        mask = column < width
        row = tl.load(hidden_ptr + column, mask=mask)
        if HAS_RESIDUAL:
            # Summed and rounded as the next fused add-norm does it.
            other = tl.load(residual_ptr + column, mask=mask)
            row = (row.to(tl.float32) + other.to(tl.float32)).to(row.dtype)
        return row

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
        AT_ONCE: tl.constexpr,
        BLOCK: tl.constexpr,
        launch_pdl: tl.constexpr,
    ):
        token = tl.program_id(0)
        column = tl.arange(0, BLOCK)
        if AT_ONCE:  # Nothing waits for anything, if the row is wanted.
            row = _stream_row(
                hidden_ptr + token * hidden_stride,
                residual_ptr + token * residual_stride,
                column,
                width,
                HAS_RESIDUAL,
            )
        base = tl.load(base_ptr)
        slot = tl.load(slots_ptr + token * slots_stride).to(tl.int64)
        if launch_pdl:
            # By all: who ends before the kernel in front of this one lets the one
            # behind begin too early.
            tl.extra.cuda.gdc_wait()
        if slot < 0:
            return
        place = staging_ptr + (base + slot) * staging_stride
        if AT_ONCE:
            tl.store(place + column, row, mask=column < width)
        else:
            for start in range(0, width, BLOCK):
                columns = start + column
                row = _stream_row(
                    hidden_ptr + token * hidden_stride,
                    residual_ptr + token * residual_stride,
                    columns,
                    width,
                    HAS_RESIDUAL,
                )
                tl.store(place + columns, row, mask=columns < width)


def block_of(width: int) -> int:
    """How many columns a kernel takes at a time."""
    return min(triton.next_power_of_2(width), 4096)


def reads_at_once(num_tokens: int, width: int) -> bool:
    """Whether rows are read before it is known that they are wanted.

    That saves a decode step the time between two loads; of a prompt's many rows, most
    of which nobody may want, the reading itself would cost more.
    """
    return num_tokens <= FEW_TOKENS and width <= block_of(width)


FEW_TOKENS = 512


def begins_early() -> bool:
    """Whether a kernel may begin while the one in front of it ends, and waits inside.

    CUDA's programmatic dependent launch: slots, rows and vectors are read meanwhile.
    They must have been written by then, which is sure where they were before the whole
    graph began.
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
    partial: bool,
) -> None:
    """Copy rows that have a slot to staging: `staging[base + slots[t]] = stream[t]`.

    Args:
        hidden: `[T, H]` (or `[1, T, H]`), the stream, or one half of the pair.
        residual: the other half, or None.
        slots: `[>= T]` int32, -1 where the token's row is not wanted.
        base: `[1]` int32: only it changes where steps are alike.
        staging: `[S, H]` in the stream's dtype.
        partial: `hidden` is this rank's part of a sum over tensor-parallel ranks.

    """
    if not Launch.wants(slots):
        return
    if partial:
        # All ranks launch alike, so all of them come here. The layer goes on with
        # its own part: only a copy is summed. Upstream sums in place on a CPU.
        part = hidden if hidden.is_cuda else hidden.clone()
        hidden = tensor_model_parallel_all_reduce(part)
    if hidden.dim() > 2:
        hidden = hidden.flatten(0, -2)
        residual = None if residual is None else residual.flatten(0, -2)
    if hidden.is_cuda:
        assert hidden.stride(-1) == 1 and staging.stride(-1) == 1
        num_tokens, width = hidden.shape
        early = begins_early()
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
            AT_ONCE=not early and reads_at_once(num_tokens, width),
            BLOCK=block_of(width),
            num_warps=8,
            launch_pdl=early,
        )
        return
    slots = slots[: hidden.shape[0]]
    tokens = (slots >= 0).nonzero().squeeze(1)
    rows = hidden[tokens]
    if residual is not None:
        rows = rows + residual[tokens]
    staging[(base + slots[tokens]).long()] = rows.to(staging.dtype)


def _capture_rows_fake(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    slots: torch.Tensor,
    base: torch.Tensor,
    staging: torch.Tensor,
    partial: bool,
) -> None:
    return None


direct_register_custom_op(
    op_name="capture_rows",
    op_func=capture_rows,
    mutates_args=["staging"],
    fake_impl=_capture_rows_fake,
)

# SPDX-License-Identifier: Apache-2.0
"""The kernel that executes the programs of a hook point, one row per token.

A row of the stream stays in registers, in float32, from the first instruction of its
program to the last, and is rounded once. All that differs between steps is data: tables
at fixed addresses map tokens to programs, and programs hold the addresses of their
vectors. So one recording serves every program.

Legend: T tokens of the step (padding included), H width of the stream.
"""

import torch

from vllm.model_executor.layers.residual.program import (
    OPENED,
    SEGMENT,
    WORDS,
    Activation,
    Flag,
    Kind,
)
from vllm.triton_utils import HAS_TRITON, tl, triton

MOST_WARPS_FROM = 8192
"""Row width from which sixteen warps are used."""
REGISTERS = {2048: 64, 4096: 80, 8192: 128}
"""Most registers of a thread, by the largest row width for which it holds.

As many blocks as possible then run on a multiprocessor with 65,536 registers: four,
three and two. Without a limit it would be three, two and one, because instructions that
measure doses need more than others.
"""


def registers(block: int) -> int | None:
    """Most registers of a thread for a row width; None for as many as there are."""
    return next((most for width, most in REGISTERS.items() if block <= width), None)


if HAS_TRITON:
    _WORDS = tl.constexpr(WORDS)
    _OPENED = tl.constexpr(OPENED)
    _SEGMENT = tl.constexpr(SEGMENT)
    _LINEAR = tl.constexpr(int(Kind.LINEAR))
    _REPLACE = tl.constexpr(int(Kind.REPLACE))
    _LOW_RANK = tl.constexpr(int(Kind.LOW_RANK))
    _ROTATE = tl.constexpr(int(Kind.ROTATE))
    _PROBE = tl.constexpr(int(Kind.PROBE))
    _MEASURE = tl.constexpr(int(Kind.MEASURE))
    _CARRIED = tl.constexpr(int(Flag.CARRIED))
    _DOT = tl.constexpr(int(Flag.DOT))
    _SAVE_NORM = tl.constexpr(int(Flag.SAVE_NORM))
    _OTHER_WRITE = tl.constexpr(int(Flag.OTHER_WRITE))
    _MASK = tl.constexpr(int(Flag.MASK))
    _ONLY_ACTIVE = tl.constexpr(int(Flag.ONLY_ACTIVE))
    _COSINE = tl.constexpr(int(Flag.COSINE))
    _KEEP = tl.constexpr(int(Flag.KEEP))
    _STANDARD = tl.constexpr(int(Flag.STANDARD))
    _DOSE = tl.constexpr(int(Flag.DOSE))
    _VALUE = tl.constexpr(int(Flag.VALUE))
    _COUNT = tl.constexpr(int(Flag.COUNT))
    _LATCH = tl.constexpr(int(Flag.LATCH))
    _RELU = tl.constexpr(int(Activation.RELU))
    _JUMPRELU = tl.constexpr(int(Activation.JUMPRELU))
    _STEP = tl.constexpr(int(Activation.STEP))
    _CLIP = tl.constexpr(int(Activation.CLIP))
    _SELECT = tl.constexpr(int(Activation.SELECT))

    @triton.jit
    def _vector(address, column, mask, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
        """Load float32 columns at an address; zeros past the width."""
        pointer = tl.cast(address, tl.pointer_type(tl.float32))
        if ALIGNED:
            pointer = tl.multiple_of(pointer, 16)
        # Other data of the step must not displace what every step reads.
        return tl.load(
            pointer + column, mask=mask, other=0.0, eviction_policy="evict_last"
        )

    @triton.jit
    def _stream(source_ptr, residual_ptr, column, mask, HAS_RESIDUAL: tl.constexpr):  # type: ignore[no-untyped-def]
        """A row of the stream in float32."""
        x = tl.load(source_ptr + column, mask=mask, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            x += tl.load(residual_ptr + column, mask=mask, other=0.0).to(tl.float32)
        return x

    @triton.jit
    def _number(address, place, other):  # type: ignore[no-untyped-def]
        """Load a float32 at an address; `other` if the address is 0."""
        pointer = tl.cast(address, tl.pointer_type(tl.float32))
        return tl.load(pointer + place, mask=address != 0, other=other)

    @triton.jit
    def _activated(value, threshold, activation, low, high):  # type: ignore[no-untyped-def]
        found = value
        if activation == _RELU:
            found = tl.maximum(value, 0.0)
        if activation == _JUMPRELU:
            found = tl.where(value > threshold, value, 0.0)
        if activation == _STEP:
            found = tl.where(value > threshold, 1.0, 0.0)
        if activation == _CLIP:
            found = tl.minimum(tl.maximum(value, low), high)
        return found

    @triton.jit
    def _selected(  # type: ignore[no-untyped-def]
        value,
        x,
        by,
        low,
        most,
        count,
        rows,
        biases,
        column,
        mask,
        width,
        ALIGNED: tl.constexpr,
    ):
        """The value if it is among the `most` largest of `count` rivals, else 0."""
        absolute = low < 0.0
        size = tl.where(absolute, tl.abs(value), value)
        larger = tl.full([], 0.0, tl.float32)
        for rival in range(tl.cast(count, tl.int32)):
            other = tl.sum(x * _vector(rows, column, mask, ALIGNED)) / by
            other += _number(biases, rival, 0.0)
            other = tl.where(absolute, tl.abs(other), other)
            larger += tl.where(other > size, 1.0, 0.0)
            rows += width * 4
        return tl.where((larger < most) & (value > low), value, 0.0)

    @triton.jit
    def _instruction(words, number, token, live):  # type: ignore[no-untyped-def]
        """The fields of an instruction that do not depend on the stream.

        Args:
            words: address of the program.
            number: of the instruction, from 0.
            token: index in the step.
            live: whether the instruction exists; otherwise all fields are 0.

        """
        at = words + (number + 1) * _WORDS
        longs = tl.cast(at, tl.pointer_type(tl.int64))
        floats = tl.cast(at, tl.pointer_type(tl.float32))
        kind = tl.load(at, mask=live, other=0)
        flags = tl.load(at + 1, mask=live, other=0)
        shift = token * tl.load(longs + 3, mask=live, other=0)
        read_at = tl.load(longs + 4, mask=live, other=0) + shift
        write_at = tl.load(longs + 5, mask=live, other=0) + shift
        c0 = tl.load(floats + 18, mask=live, other=0.0)
        c1 = tl.load(floats + 19, mask=live, other=0.0)
        c2 = tl.load(floats + 20, mask=live, other=0.0)
        c3 = tl.load(floats + 21, mask=live, other=0.0)
        return kind, flags, read_at, write_at, c0, c1, c2, c3

    @triton.jit
    def _opened_at(gates_ptr, stride, token, first, gate):  # type: ignore[no-untyped-def]
        """Where the first token of a token's request that opens a gate is noted."""
        noted = tl.cast(gates_ptr, tl.pointer_type(tl.int32))
        segment = tl.load(noted + token * stride + _SEGMENT).to(tl.int64) - first
        return noted + segment * stride + _OPENED + gate

    @triton.jit
    def _amount(base, c2, c3, low, high, dot):  # type: ignore[no-untyped-def]
        """The factor of the written vector of an instruction that reads x . u."""
        clipped = tl.minimum(tl.maximum(dot, low), high)
        return base + (c2 * dot + c3 * (clipped - dot))

    @triton.jit
    def _write(  # type: ignore[no-untyped-def]
        x,
        hidden_ptr,  # [H], this rank's part of the branch
        residual_ptr,  # [H] or unused
        column,
        mask,
        HAS_RESIDUAL: tl.constexpr,
        LEADS: tl.constexpr,
    ):
        """Round a changed row and write it to the branch."""
        nothing = tl.zeros(x.shape, hidden_ptr.dtype.element_ty)
        if LEADS:
            tl.store(hidden_ptr + column, x.to(nothing.dtype), mask=mask)
        else:
            tl.store(hidden_ptr + column, nothing, mask=mask)
        if HAS_RESIDUAL:
            tl.store(residual_ptr + column, nothing, mask=mask)

    @triton.jit(do_not_specialize=["first"])
    def _intervene_kernel(  # type: ignore[no-untyped-def]  # noqa: C901, PLR0915
        source_ptr,  # [T, H], the branch, whole
        hidden_ptr,  # [T, H], this rank's part of it
        residual_ptr,  # [T, H] or unused
        index_ptr,  # [rows], int64: the address of a program, or 0
        rows_ptr,  # [T], int32
        gates_ptr,  # [T, columns], float32
        source_stride,
        hidden_stride,
        residual_stride,
        gates_stride,
        width,
        first,  # index of the first token in the step
        HAS_RESIDUAL: tl.constexpr,
        LEADS: tl.constexpr,
        ALIGNED: tl.constexpr,
        BLOCK: tl.constexpr,
        launch_pdl: tl.constexpr,
    ):
        token = tl.program_id(0).to(tl.int64)
        column = tl.arange(0, BLOCK)
        mask = column < width
        row = tl.load(rows_ptr + token).to(tl.int64)
        program = tl.load(index_ptr + row)
        exists = program != 0
        words = tl.cast(program, tl.pointer_type(tl.int32))
        is_simple = tl.load(words + 1, mask=exists, other=0)
        kind, flags, read_at, write_at, c0, c1, c2, c3 = _instruction(
            words, 0, token + first, exists
        )
        gate_of_simple = tl.load(words + _WORDS + 4, mask=exists, other=-1)
        floats = tl.cast(words + _WORDS, tl.pointer_type(tl.float32))
        low = tl.load(floats + 22, mask=exists, other=0.0)
        high = tl.load(floats + 23, mask=exists, other=0.0)
        u = _vector(read_at, column, column < tl.where(exists, width, 0), ALIGNED)
        hidden_ptr += token * hidden_stride
        source_ptr += token * source_stride
        residual_ptr += token * residual_stride
        gates_of_token = gates_ptr + token * gates_stride
        # These inputs were written before the graph started; the stream may still be
        # written. Every block waits: one that exits before the previous kernel has
        # finished would let the next kernel start too early.
        if launch_pdl:
            tl.extra.cuda.gdc_wait()
            # The next kernel may start if it waits for this one in the same way.
            tl.extra.cuda.gdc_launch_dependents()
        if program == 0:
            return
        x = _stream(source_ptr, residual_ptr, column, mask, HAS_RESIDUAL)
        if is_simple != 0:
            # Most programs. A path of their own saves 0.7 µs, as the GPU fetches less
            # code for it than for the loop below.
            w = u
            if (flags & _OTHER_WRITE) != 0:
                w = _vector(write_at, column, mask, ALIGNED)
            has_gate = gate_of_simple >= 0
            gate = tl.load(gates_of_token + gate_of_simple, mask=has_gate, other=1.0)
            amount = c0
            if (flags & _SAVE_NORM) != 0:
                amount = c0 + c1 * tl.sqrt(tl.sum(x * x))
            if (flags & _DOT) != 0:
                amount = _amount(amount, c2, c3, low, high, tl.sum(x * u))
            amount *= gate
            if amount != 0.0:
                x += amount * w
                _write(x, hidden_ptr, residual_ptr, column, mask, HAS_RESIDUAL, LEADS)
            return
        count = tl.load(words)
        norm = tl.full([], 0.0, tl.float32)
        changed = tl.full([], 0, tl.int32)
        for number in range(count):
            at = words + (number + 1) * _WORDS
            longs = tl.cast(at, tl.pointer_type(tl.int64))
            floats = tl.cast(at, tl.pointer_type(tl.float32))
            slot = tl.load(at + 4)
            gate_at = gates_of_token + slot
            gate = tl.full([], 1.0, tl.float32)
            if kind != _PROBE:
                gate = tl.load(gate_at, mask=slot >= 0, other=1.0)
                if (flags & _LATCH) != 0:
                    # Probes at earlier hook points have noted it.
                    at_first = _opened_at(gates_ptr, gates_stride, token, first, slot)
                    is_open = tl.load(at_first) <= token + first
                    gate = tl.where(is_open, 1.0, gate)
            if (flags & _SAVE_NORM) != 0:
                norm = tl.sqrt(tl.sum(x * x))
            doses = (flags & _DOSE) != 0
            base = tl.full([], 1.0, tl.float32)  # |x|^2 before the instruction
            moved = tl.full([], 0.0, tl.float32)  # |change|^2
            dose = tl.full([], 0.0, tl.float32)
            if doses:
                base = tl.sum(x * x)
            if kind <= _REPLACE:
                w = u
                if (flags & _OTHER_WRITE) != 0:
                    w = _vector(write_at, column, mask, ALIGNED)
                factor = norm
                if (flags & _CARRIED) != 0:
                    factor = tl.load(gates_of_token + tl.load(at + 25))
                    factor += _number(tl.load(longs + 7), 0, 0.0)
                    threshold = _number(tl.load(longs + 8), 0, 0.0)
                    factor = tl.where(factor > threshold, factor, 0.0)
                amount = c0 + c1 * factor
                if (flags & _ONLY_ACTIVE) != 0:
                    amount = tl.where(factor != 0.0, amount, 0.0)
                if (flags & _DOT) != 0:
                    low = tl.load(floats + 22)
                    high = tl.load(floats + 23)
                    amount = _amount(amount, c2, c3, low, high, tl.sum(x * u))
                if kind == _LINEAR:
                    amount *= gate
                    if doses:
                        moved = amount * amount * tl.sum(w * w)
                    x += amount * w
                    changed = tl.where(amount != 0.0, 1, changed)
                else:
                    share = gate * tl.load(floats + 24)
                    part = tl.zeros([BLOCK], tl.float32) + share
                    if (flags & _MASK) != 0:
                        part *= _vector(tl.load(longs + 6), column, mask, ALIGNED)
                    value = amount * w
                    mixed = x * (1.0 - part) + part * value
                    mixed = tl.where(part == 0.0, x, mixed)
                    mixed = tl.where(part == 1.0, value, mixed)
                    if doses:
                        moved = tl.sum((mixed - x) * (mixed - x))
                    x = mixed
                    changed = tl.where(share != 0.0, 1, changed)
            if kind == _LOW_RANK:
                rank = tl.load(at + 2)
                activation = tl.load(at + 3)
                low = tl.load(floats + 22)
                high = tl.load(floats + 23)
                biases = tl.load(longs + 7)
                thresholds = tl.load(longs + 8)
                c0s = tl.load(longs + 13)
                c1s = tl.load(longs + 14)
                size = tl.full([], 1.0, tl.float32)
                by = size
                if (flags & _COSINE) != 0:
                    size = tl.sqrt(tl.sum(x * x))
                    by = tl.maximum(size, 1.1754944e-38)
                if (flags & _STANDARD) != 0:
                    off = tl.where(mask, x - tl.sum(x) / width, 0.0)
                    size = tl.sqrt(tl.sum(off * off) / (width - 1))
                    by = size + 1e-5
                total = tl.zeros([BLOCK], tl.float32)
                for place in range(rank):
                    direction = _vector(read_at, column, mask, ALIGNED)
                    value = tl.sum(x * direction) / by + _number(biases, place, 0.0)
                    threshold = _number(thresholds, place, 0.0)
                    active = _activated(value, threshold, activation, low, high)
                    if activation == _SELECT:
                        rivals = tl.load(longs + 6)
                        active = _selected(
                            value,
                            x,
                            by,
                            low,
                            c2,
                            c3,
                            rivals,
                            thresholds,
                            column,
                            mask,
                            width,
                            ALIGNED,
                        )
                    dose = active  # A store of its own would take more stack.
                    own = (c1 + _number(c1s, place, 0.0)) * active
                    amount = gate * size * (c0 + _number(c0s, place, 0.0) + own)
                    if (flags & _ONLY_ACTIVE) != 0:
                        amount = tl.where(active != 0.0, amount, 0.0)
                    total += amount * _vector(write_at, column, mask, ALIGNED)
                    changed = tl.where(amount != 0.0, 1, changed)
                    read_at += width * 4
                    write_at += width * 4
                if doses:
                    moved = tl.sum(total * total)
                x += total
            if kind == _ROTATE:
                w = _vector(write_at, column, mask, ALIGNED)
                a = tl.sum(x * u)
                b = tl.sum(x * w)
                length = tl.sqrt(a * a + b * b)
                along = gate * (length * c0 - a)
                across = gate * (length * c1 - b)
                moved = along * along + across * across
                x += along * u + across * w
                turned = (along != 0.0) | (across != 0.0)
                changed = tl.where(turned, 1, changed)
            if kind == _PROBE:
                value = tl.sum(x * u)
                if (flags & _COSINE) != 0:
                    value /= tl.maximum(tl.sqrt(tl.sum(x * x)), 1.1754944e-38)
                if (flags & _STANDARD) != 0:
                    off = tl.where(mask, x - tl.sum(x) / width, 0.0)
                    value /= tl.sqrt(tl.sum(off * off) / (width - 1)) + 1e-5
                beyond = c3 * (value + c0 - c2)
                decided = tl.where(beyond > 0.0, 1.0, 0.0)
                if c1 != 0.0:
                    decided = 1.0 / (1.0 + tl.exp(-c1 * beyond))
                if (flags & _VALUE) != 0:
                    decided = value + c0
                if (flags & _KEEP) != 0:
                    decided = tl.maximum(decided, tl.load(gate_at))
                tl.store(gate_at, decided)
                if ((flags & _LATCH) != 0) & (decided > 0.0):
                    at_first = _opened_at(gates_ptr, gates_stride, token, first, slot)
                    tl.atomic_min(at_first, (token + first).to(tl.int32))
                # Later instructions of this program may read the gate.
                tl.debug_barrier()
                dose = decided
                if ((flags & _COUNT) != 0) & (decided > 0.5):
                    fired_at = tl.cast(tl.load(longs + 6), tl.pointer_type(tl.int64))
                    tl.atomic_add(fired_at, 1)
            if kind == _MEASURE:
                base = tl.sum((x - u) * (x - u))
                moved = tl.sum(u * u)
            if doses:
                dose_at = tl.cast(tl.load(longs + 15), tl.pointer_type(tl.float32))
                dose_at += (token + first) * tl.load(at + 5)
                if (kind != _PROBE) & ((flags & _VALUE) == 0):
                    dose = tl.sqrt(moved) / tl.maximum(tl.sqrt(base), 1.1754944e-38)
                tl.store(dose_at, dose)
            # Load the next instruction's fields while this one is executed.
            kind, flags, read_at, write_at, c0, c1, c2, c3 = _instruction(
                words, number + 1, token + first, number + 1 < count
            )
            there = tl.where(number + 1 < count, width, 0)
            u = _vector(read_at, column, column < there, ALIGNED)
        if changed != 0:
            _write(x, hidden_ptr, residual_ptr, column, mask, HAS_RESIDUAL, LEADS)


def launch_programs(
    source: torch.Tensor,
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    index: torch.Tensor,
    rows: torch.Tensor,
    gates: torch.Tensor,
    *,
    leads: bool = True,
    early: bool = False,
    first: int = 0,
) -> None:
    """Execute each token's program, in place.

    Args:
        source: `[T, H]`, the branch, summed over ranks; may be `hidden`.
        hidden: `[T, H]`, the branch. Changed rows become the result, or zeros on ranks
            other than the leading one.
        residual: `[T, H]` or None; changed rows become zeros.
        index: `[rows]` int64, the address of the program of each row, or 0.
        rows: `[>= T]` int32.
        gates: `[>= T, columns]` float32, which probes write.
        leads: whether this rank writes the result.
        early: whether the kernel may start while the previous one finishes.
        first: index in the step of the first row, if ranks split the tokens.

    """
    num_tokens, width = hidden.shape
    assert source.stride(-1) == hidden.stride(-1) == 1, "rows must be contiguous"
    assert residual is None or residual.stride(-1) == 1, "rows must be contiguous"
    block = triton.next_power_of_2(width)
    _intervene_kernel[(num_tokens,)](
        source,
        hidden,
        hidden if residual is None else residual,
        index,
        rows,
        gates,
        source.stride(0),
        hidden.stride(0),
        0 if residual is None else residual.stride(0),
        gates.stride(0),
        width,
        first,
        HAS_RESIDUAL=residual is not None,
        LEADS=leads,
        ALIGNED=width % 4 == 0,
        BLOCK=block,
        num_warps=16 if block > MOST_WARPS_FROM else 8,
        maxnreg=registers(block),
        launch_pdl=early,
    )

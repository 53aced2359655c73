# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of programs in plain PyTorch, the reference for what executes them.

Legend: H width of the stream, r rank, n rows of the stream, T tokens of the step.
"""

import torch

from vllm.model_executor.layers.residual.program import (
    DEVIATION,
    FIRES_ABOVE,
    NO_GATE,
    OPENED,
    SEGMENT,
    SMALLEST,
    Activation,
    Flag,
    Instruction,
    Kind,
    Program,
)

Tensor = torch.Tensor


def run(
    program: Program,
    stream: Tensor,  # [n, H]
    tokens: Tensor,  # [n], int64: of the step
    gates: Tensor,  # [T, GATE_COLUMNS], float32, which probes write
) -> tuple[Tensor, Tensor]:
    """The rows after a program, `[n, H]`, and which of them it changed, `[n]`."""
    changed = torch.zeros(len(stream), 1, dtype=torch.bool, device=stream.device)
    saved = stream.new_zeros(len(stream), 1)
    for one in program:
        if one.flags & Flag.SAVE_NORM:
            saved = _norm(stream)
        if one.kind == Kind.PROBE:
            _decide(one, stream, tokens, gates)
            continue
        before, after = stream, stream
        if one.flags & Flag.VALUE:
            assert one.doses is not None, "nothing else is stored"
            one.doses[tokens] = _low_rank_values(one, stream)[0][:, -1]
            continue
        if one.kind == Kind.MEASURE:
            before = stream - one.read
        else:
            norm = _carried(one, tokens, gates) if one.flags & Flag.CARRIED else saved
            gate = _gate(one, tokens, gates)
            after, acts = _STEPS[one.kind](one, stream, tokens, norm, gate)
            changed = changed | acts
        if one.doses is not None:
            dose = _norm(after - before) / _norm(before).clamp(min=SMALLEST)
            one.doses[tokens] = dose[:, 0]
        stream = after
    return stream, changed[:, 0]


def _norm(rows: Tensor) -> Tensor:
    return rows.norm(dim=-1, keepdim=True)


def _gate(one: Instruction, tokens: Tensor, gates: Tensor) -> Tensor:
    """The gate of an instruction that is no probe, `[n, 1]`."""
    if one.gate == NO_GATE:
        return torch.ones(len(tokens), 1, device=gates.device)
    gate = gates[tokens, one.gate, None]
    if one.flags & Flag.LATCH:
        noted = gates.view(torch.int32)
        opened = noted[noted[tokens, SEGMENT].long(), OPENED + one.gate]
        gate = torch.where((opened <= tokens)[:, None], 1.0, gate)
    return gate


def _carried(one: Instruction, tokens: Tensor, gates: Tensor) -> Tensor:
    """The y of a value that a probe has stored, `[n, 1]`."""
    value = gates[tokens, one.stored, None]
    value = value if one.bias is None else value + one.bias
    threshold = 0.0 if one.threshold is None else one.threshold
    return torch.where(value > threshold, value, 0.0)


def _rows(table: Tensor, one: Instruction, tokens: Tensor) -> Tensor:
    """The vector of each token, `[1, H]` or `[n, H]`."""
    return table[:1] if one.offset is None else table[tokens + one.offset]


def _linear(
    one: Instruction, stream: Tensor, tokens: Tensor, norm: Tensor, gate: Tensor
) -> tuple[Tensor, Tensor]:
    amount = one.c0 + one.c1 * norm
    if one.flags & Flag.DOT:
        dot = (stream * _rows(one.read, one, tokens)).sum(-1, keepdim=True)
        amount = amount + one.c2 * dot + one.c3 * (dot.clamp(one.low, one.high) - dot)
    amount = gate * amount
    if one.flags & Flag.ONLY_ACTIVE:
        amount = torch.where(norm != 0, amount, 0.0)
    return stream + amount * _rows(one.written, one, tokens), amount != 0


def _replace(
    one: Instruction, stream: Tensor, tokens: Tensor, norm: Tensor, gate: Tensor
) -> tuple[Tensor, Tensor]:
    value = (one.c0 + one.c1 * norm) * _rows(one.written, one, tokens)
    part = gate * one.alpha * (1.0 if one.mask is None else one.mask)
    mixed = torch.where(part == 1, value, stream * (1 - part) + part * value)
    return torch.where(part == 0, stream, mixed), gate * one.alpha != 0


def _low_rank(
    one: Instruction, stream: Tensor, tokens: Tensor, norm: Tensor, gate: Tensor
) -> tuple[Tensor, Tensor]:
    active, size = _low_rank_values(one, stream)
    c0 = one.c0 if one.own_c0 is None else one.c0 + one.own_c0
    c1 = one.c1 if one.own_c1 is None else one.c1 + one.own_c1
    amount = gate * size * (c0 + c1 * active)
    if one.flags & Flag.ONLY_ACTIVE:
        amount = torch.where(active != 0, amount, 0.0)
    return stream + amount @ one.written, (amount != 0).any(-1, keepdim=True)


def _low_rank_values(one: Instruction, stream: Tensor) -> tuple[Tensor, Tensor]:
    """The y `[n, r]`, and by what the addition is multiplied, `[n, 1]`."""
    size = by = torch.ones_like(stream[:, :1])
    if one.flags & Flag.COSINE:
        size, by = _norm(stream), _norm(stream).clamp(min=SMALLEST)
    elif one.flags & Flag.STANDARD:
        size = stream.std(dim=-1, keepdim=True)
        by = size + DEVIATION
    value = stream @ one.read.T / by
    value = value if one.bias is None else value + one.bias
    if one.activation == Activation.SELECT:
        return _selected(one, value, stream / by), size
    return _activated(one, value), size


def _activated(one: Instruction, value: Tensor) -> Tensor:
    threshold = 0.0 if one.threshold is None else one.threshold
    match one.activation:
        case Activation.RELU:
            return value.relu()
        case Activation.JUMPRELU:
            return torch.where(value > threshold, value, 0.0)
        case Activation.STEP:
            return (value > threshold).to(value.dtype)
        case Activation.CLIP:
            return value.clamp(one.low, one.high)
    return value


def _selected(one: Instruction, value: Tensor, scaled: Tensor) -> Tensor:
    """The values `[n, r]` that are among the largest of all rivals; others are 0."""
    assert one.mask is not None and one.threshold is not None, "there are rivals"
    rivals, sizes = scaled @ one.mask.T + one.threshold, value
    if one.low < 0:
        rivals, sizes = rivals.abs(), value.abs()
    # A matrix product may round a feature's own value in another way.
    own = (one.mask[:, None] == one.read).all(-1)  # [rivals, r]
    larger = (rivals[:, :, None] > sizes[:, None]) & ~own
    return torch.where((larger.sum(1) < one.c2) & (value > one.low), value, 0.0)


def _rotate(
    one: Instruction, stream: Tensor, tokens: Tensor, norm: Tensor, gate: Tensor
) -> tuple[Tensor, Tensor]:
    first, second = one.read[:1], one.written[:1]
    a, b = stream @ first.T, stream @ second.T
    length = (a * a + b * b).sqrt()
    along, across = gate * (length * one.c0 - a), gate * (length * one.c1 - b)
    return stream + along * first + across * second, (along != 0) | (across != 0)


_STEPS = {
    Kind.LINEAR: _linear,
    Kind.REPLACE: _replace,
    Kind.LOW_RANK: _low_rank,
    Kind.ROTATE: _rotate,
}


def _decide(one: Instruction, stream: Tensor, tokens: Tensor, gates: Tensor) -> None:
    """Carry out a probe."""
    value = (stream * one.read[:1]).sum(-1)
    if one.flags & Flag.COSINE:
        value = value / stream.norm(dim=-1).clamp(min=SMALLEST)
    elif one.flags & Flag.STANDARD:
        value = value / (stream.std(dim=-1) + DEVIATION)
    decided = value + one.c0
    if not one.flags & Flag.VALUE:
        beyond = one.c3 * (decided - one.c2)
        fires = (beyond > 0).to(value.dtype)
        decided = torch.sigmoid(one.c1 * beyond) if one.c1 else fires
    if one.flags & Flag.KEEP:
        decided = torch.maximum(decided, gates[tokens, one.gate])
    gates[tokens, one.gate] = decided
    if one.flags & Flag.LATCH:
        opening, noted = tokens[decided > 0], gates.view(torch.int32)
        segments = noted[opening, SEGMENT].long()
        column = noted[:, OPENED + one.gate]
        column.scatter_reduce_(0, segments, opening.int(), "amin")
    if one.doses is not None:
        one.doses[tokens] = decided
    if one.fired is not None:
        one.fired.add_((decided > FIRES_ABOVE).sum())

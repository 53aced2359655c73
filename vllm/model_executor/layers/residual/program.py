# SPDX-License-Identifier: Apache-2.0
"""What a hook point does to one token's row of the stream: a list of instructions.

With x the row in float32, u a vector that is read and w one that is written, g the
instruction's gate (1 where it has none) and n the norm of x that was saved last:

- `LINEAR`: x += g (c0 + c1 n + c2 (x . u) + c3 (clip(x . u, low, high) - x . u)) w;
- `REPLACE`: x = (1 - m) x + m (c0 + c1 n) w, with m = g alpha times the mask, and
  exactly the second term where m is 1;
- `LOW_RANK`: y = f(read x + bias); x += g sum_r (c0 + c1 y_r) w_r, where each
  direction may have a c0 and a c1 of its own, which are added; with `COSINE` read x is
  divided by |x|, with `STANDARD` by x's deviation d + 1e-5, and what is added is
  multiplied by |x|, by d;
- `ROTATE`: the part of x in the plane of u and w, which are orthonormal, keeps its
  length and gets the angle whose cosine and sine are c0 and c1;
- `PROBE`: v = x . u (over |x| where `COSINE` is set) + c0, z = c3 (v - c2); the gate
  becomes 1 where z > 0 and 0 elsewhere, or sigmoid(c1 z) where c1 is not 0; with `KEEP`
  it stays what it was where that is more.

This module has the form that kernels read and the arithmetic in plain PyTorch, which
is what a CPU runs and what the kernel is compared with.

Legend: H width of the stream, r rank, n rows of the stream.
"""

from dataclasses import dataclass
from enum import IntEnum, IntFlag

import numpy as np
import numpy.typing as npt
import torch


class Kind(IntEnum):
    """What an instruction does."""

    LINEAR = 0
    REPLACE = 1
    LOW_RANK = 2
    ROTATE = 3
    PROBE = 4


class Flag(IntFlag):
    """What else it does or needs."""

    NONE = 0
    DOT = 1
    """It needs x . u."""
    SAVE_NORM = 2
    """Before it, the norm of x is saved."""
    OTHER_WRITE = 4
    """What it writes is not what it reads."""
    MASK = 8
    """It has a mask `[H]`."""
    ONLY_ACTIVE = 16
    """Directions whose y is 0 write nothing."""
    COSINE = 32
    """What it reads is divided by |x|."""
    KEEP = 128
    """A probe that leaves a gate open that was."""
    STANDARD = 64
    """What it reads is divided by the standard deviation of x's numbers."""


class Activation(IntEnum):
    """The f of `LOW_RANK`, with a threshold t for each direction."""

    IDENTITY = 0
    RELU = 1
    JUMPRELU = 2
    """The value where it is above t, else 0."""
    STEP = 3
    """1 where the value is above t, else 0."""
    CLIP = 4
    """Between `low` and `high`."""


WORDS = 32
"""Of 4 bytes, that an instruction takes, and the head of a program too."""
NO_GATE = -1
SMALLEST = 1.1754943508222875e-38
"""What a norm is at least, where something is divided by it."""
DEVIATION = 1e-5
"""What is added to a deviation, as SAELens does in `layer_norm`."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One step of a program. Its tensors are float32, contiguous, on the device."""

    kind: Kind
    read: torch.Tensor  # [r, H]; [rows, H] where `offset` is set
    write: torch.Tensor | None = None  # the same shape; None: `read`
    flags: Flag = Flag.NONE
    c0: float = 0.0
    c1: float = 0.0
    c2: float = 0.0
    c3: float = 0.0
    low: float = -np.inf
    high: float = np.inf
    alpha: float = 1.0
    activation: Activation = Activation.IDENTITY
    bias: torch.Tensor | None = None  # [r]
    threshold: torch.Tensor | None = None  # [r]
    mask: torch.Tensor | None = None  # [H]
    own_c0: torch.Tensor | None = None  # [r]
    own_c1: torch.Tensor | None = None  # [r]
    gate: int = NO_GATE
    """The column of the gates that it multiplies by, or that a probe writes."""
    offset: int | None = None
    """If set, token t of the step reads and writes row t + offset."""

    @property
    def written(self) -> torch.Tensor:
        """What it writes."""
        return self.read if self.write is None else self.write

    def words(self) -> npt.NDArray[np.int32]:
        """The form that the kernel reads `[WORDS]`, by the addresses of its tensors."""
        made = np.zeros(WORDS, dtype=np.int32)
        longs, floats = made.view(np.int64), made.view(np.float32)
        flags = self.flags
        if self.write is not None:
            flags |= Flag.OTHER_WRITE
        if self.mask is not None:
            flags |= Flag.MASK
        rank = 1 if self.offset is not None else len(self.read)
        made[:5] = self.kind, flags, rank, self.activation, self.gate
        bytes_of_row = self.read.stride(0) * self.read.element_size()
        shift = 0 if self.offset is None else self.offset * bytes_of_row
        longs[3] = 0 if self.offset is None else bytes_of_row
        longs[4] = self.read.data_ptr() + shift
        longs[5] = self.written.data_ptr() + shift
        for place, tensor in (
            (6, self.mask),
            (7, self.bias),
            (8, self.threshold),
            (13, self.own_c0),
            (14, self.own_c1),
        ):
            longs[place] = 0 if tensor is None else tensor.data_ptr()
        floats[18:25] = (
            self.c0,
            self.c1,
            self.c2,
            self.c3,
            self.low,
            self.high,
            self.alpha,
        )
        return made


Program = tuple[Instruction, ...]
"""In the order in which they are carried out."""


def words_of(program: Program) -> npt.NDArray[np.int32]:
    """What the kernel reads `[(1 + n) * WORDS]`: the number n of instructions first."""
    head = np.zeros(WORDS, dtype=np.int32)
    head[0] = len(program)
    return np.concatenate([head, *(one.words() for one in program)])


def run(
    program: Program,
    stream: torch.Tensor,  # [n, H], float32
    tokens: torch.Tensor,  # [n], int64: of the step
    gates: torch.Tensor,  # [T, columns], float32, which probes write
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows behind a program `[n, H]`, and which of them it changed `[n]`."""
    changed = torch.zeros(len(stream), dtype=torch.bool, device=stream.device)
    norm = torch.zeros(len(stream), 1, device=stream.device)
    for one in program:
        if one.flags & Flag.SAVE_NORM:
            norm = stream.norm(dim=-1, keepdim=True)
        if one.kind == Kind.PROBE:
            decided = _gate(one, stream)
            if one.flags & Flag.KEEP:
                decided = torch.maximum(decided, gates[tokens, one.gate])
            gates[tokens, one.gate] = decided
            continue
        gate = torch.ones_like(norm)
        if one.gate != NO_GATE:
            gate = gates[tokens, one.gate, None]
        stream, acts = _STEPS[one.kind](one, stream, tokens, norm, gate)
        changed |= acts.squeeze(-1)
    return stream, changed


Outcome = tuple[torch.Tensor, torch.Tensor]
"""The rows `[n, H]`, and which may have changed `[n, 1]`."""


def _rows(table: torch.Tensor, one: Instruction, tokens: torch.Tensor) -> torch.Tensor:
    """The vector of each token, `[1, H]` or `[n, H]`."""
    return table[:1] if one.offset is None else table[tokens + one.offset]


def _dot(stream: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """`[n, 1]`."""
    if len(vectors) == 1:
        return stream @ vectors.T
    return (stream * vectors).sum(-1, keepdim=True)


def _coefficient(
    one: Instruction, stream: torch.Tensor, read: torch.Tensor, norm: torch.Tensor
) -> torch.Tensor:
    found = one.c0 + one.c1 * norm
    if one.flags & Flag.DOT:
        dot = _dot(stream, read)
        clipped = dot.clamp(one.low, one.high)
        found = found + one.c2 * dot + one.c3 * (clipped - dot)
    return found


def _linear(
    one: Instruction,
    stream: torch.Tensor,
    tokens: torch.Tensor,
    norm: torch.Tensor,
    gate: torch.Tensor,
) -> Outcome:
    read = _rows(one.read, one, tokens)
    amount = gate * _coefficient(one, stream, read, norm)
    return stream + amount * _rows(one.written, one, tokens), amount != 0


def _replace(
    one: Instruction,
    stream: torch.Tensor,
    tokens: torch.Tensor,
    norm: torch.Tensor,
    gate: torch.Tensor,
) -> Outcome:
    value = (one.c0 + one.c1 * norm) * _rows(one.written, one, tokens)
    share = gate * one.alpha
    part = share if one.mask is None else share * one.mask
    mixed = stream * (1 - part) + part * value
    mixed = torch.where(part == 1, value, torch.where(part == 0, stream, mixed))
    return mixed, share != 0


def _low_rank(
    one: Instruction,
    stream: torch.Tensor,
    tokens: torch.Tensor,
    norm: torch.Tensor,
    gate: torch.Tensor,
) -> Outcome:
    read = stream @ one.read.T
    size = torch.ones_like(norm)
    if one.flags & Flag.COSINE:
        size = stream.norm(dim=-1, keepdim=True)
        read = read / size.clamp(min=SMALLEST)
    elif one.flags & Flag.STANDARD:
        size = stream.std(dim=-1, keepdim=True)
        read = read / (size + DEVIATION)
    if one.bias is not None:
        read = read + one.bias
    active = _activated(one, read)
    c0 = one.c0 if one.own_c0 is None else one.c0 + one.own_c0
    c1 = one.c1 if one.own_c1 is None else one.c1 + one.own_c1
    amount = gate * size * (c0 + c1 * active)
    if one.flags & Flag.ONLY_ACTIVE:
        amount = torch.where(active != 0, amount, 0.0)
    return stream + amount @ one.written, (amount != 0).any(-1, keepdim=True)


def _activated(one: Instruction, read: torch.Tensor) -> torch.Tensor:
    threshold = 0.0 if one.threshold is None else one.threshold
    if one.activation == Activation.RELU:
        return read.relu()
    if one.activation == Activation.JUMPRELU:
        return torch.where(read > threshold, read, 0.0)
    if one.activation == Activation.STEP:
        return (read > threshold).to(read.dtype)
    if one.activation == Activation.CLIP:
        return read.clamp(one.low, one.high)
    return read


def _rotate(
    one: Instruction,
    stream: torch.Tensor,
    tokens: torch.Tensor,
    norm: torch.Tensor,
    gate: torch.Tensor,
) -> Outcome:
    first, second = one.read[:1], one.written[:1]
    a, b = _dot(stream, first), _dot(stream, second)
    length = (a * a + b * b).sqrt()
    along, across = gate * (length * one.c0 - a), gate * (length * one.c1 - b)
    return stream + along * first + across * second, (along != 0) | (across != 0)


_STEPS = {
    Kind.LINEAR: _linear,
    Kind.REPLACE: _replace,
    Kind.LOW_RANK: _low_rank,
    Kind.ROTATE: _rotate,
}


def _gate(one: Instruction, stream: torch.Tensor) -> torch.Tensor:
    """What a probe decides for each row `[n]`."""
    # Each row by itself: a product of matrices may round by their shape, and a decision
    # must not depend on how many tokens the step has.
    value = (stream * one.read[:1]).sum(-1)
    if one.flags & Flag.COSINE:
        value = value / stream.norm(dim=-1).clamp(min=SMALLEST)
    beyond = one.c3 * (value + one.c0 - one.c2)
    if one.c1:
        return torch.sigmoid(one.c1 * beyond)
    return (beyond > 0).to(torch.float32)

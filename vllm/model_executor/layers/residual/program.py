# SPDX-License-Identifier: Apache-2.0
"""Programs: the instructions of a hook point for one token's row of the stream.

With x the row in float32, u a vector that is read and w one that is written, g the
instruction's gate (1 if it has none) and n the norm of x that was saved last:

- `LINEAR`: x += g (c0 + c1 n + c2 (x . u) + c3 (clip(x . u, low, high) - x . u)) w;
- `REPLACE`: x = (1 - m) x + m (c0 + c1 n) w, with m = g alpha times the mask, and
  exactly the second term where m is 1;
- `LOW_RANK`: y = f(read x + bias); x += g sum_r (c0 + c1 y_r) w_r, where each direction
  may have additional c0 and c1, which are added; with `COSINE`, read x is divided by
  |x|, and with `STANDARD` by d + 1e-5 for the standard deviation d of x; the addition
  is multiplied by |x| or by d; with f `SELECT`, y is the value if it is above `low` and
  fewer than c2 of the c3 rivals are larger (in absolute value if `low` is -inf), where
  a rival's value is that of a row of `mask` with a bias in `threshold`, and else 0;
- `ROTATE`: the component of x in the plane of u and w, which are orthonormal, keeps its
  norm and gets the angle whose cosine and sine are c0 and c1;
- `PROBE`: v = x . u (divided as for `LOW_RANK`) + c0, z = c3 (v - c2); the gate
  becomes 1 if z > 0 and else 0, or sigmoid(c1 z) if c1 is not 0; with `KEEP` it does
  not decrease; with `VALUE` it becomes v itself; with `LATCH` the first token of a
  request's in the step whose gate opens is noted, and instructions with `LATCH` that
  read the gate at later hook points find it open from that token on;
- `MEASURE`: changes nothing; u has been added to the stream before.

With `CARRIED`, n is y = f(v + bias) for the v that a probe with `VALUE` has stored at
an earlier hook point, and f `JUMPRELU`; with `ONLY_ACTIVE` nothing is written where y
is 0.

An instruction with `doses` also stores, for each token, the norm of its change over the
norm of x before it: for `MEASURE` that of u over that of x - u, for `PROBE` the gate,
for `LOW_RANK` with `VALUE` the last y.

This module defines the form that a GPU's kernel and the native library read.

Legend: H width of the stream, r rank.
"""

from dataclasses import dataclass
from enum import IntEnum, IntFlag

import numpy as np
import numpy.typing as npt
import torch


class Kind(IntEnum):
    """The kind of an instruction; see the formulas above."""

    LINEAR = 0
    REPLACE = 1
    LOW_RANK = 2
    ROTATE = 3
    PROBE = 4
    MEASURE = 5


class Flag(IntFlag):
    """Properties of an instruction."""

    NONE = 0
    DOT = 1
    """The instruction needs x . u."""
    SAVE_NORM = 2
    """The norm of x is saved before the instruction."""
    OTHER_WRITE = 4
    """The written vectors differ from the read ones."""
    MASK = 8
    """The instruction has a mask `[H]`."""
    ONLY_ACTIVE = 16
    """Directions with y = 0 write nothing."""
    COSINE = 32
    """The products that it reads are divided by |x|."""
    KEEP = 128
    """The probe leaves an open gate open."""
    STANDARD = 64
    """The products that it reads are divided by the standard deviation of x's
    values."""
    DOSE = 256
    """The instruction stores its dose."""
    VALUE = 1024
    """The probe stores v, from which the gate is decided later; `LOW_RANK` stores y in
    place of its dose."""
    COUNT = 512
    """The probe counts the tokens whose gate is above one half."""
    CARRIED = 4096
    """In place of n, y is used, for a value that a probe has stored."""
    LATCH = 2048
    """A gate that opens at one of a request's tokens is open at all later ones."""


SIMPLE = Flag.DOT | Flag.SAVE_NORM | Flag.OTHER_WRITE
"""Flags that an instruction of a simple program may have."""


class Activation(IntEnum):
    """The f of `LOW_RANK`, with a threshold t for each direction."""

    IDENTITY = 0
    RELU = 1
    JUMPRELU = 2
    """The value if it is above t, else 0."""
    STEP = 3
    """1 if the value is above t, else 0."""
    CLIP = 4
    """The value clipped to `low` and `high`."""
    SELECT = 5
    """The value if it is among the largest of all rivals, else 0."""


WORDS = 32
"""Size of an instruction, and of the head of a program, in words of 4 bytes."""
NO_GATE = -1
GATES = 16
"""Number of gates of a token, in the first columns of the tensor of gates."""
OPENED = GATES
"""For each gate, the column with the first token that opens it in this step (int32,
`NEVER` if none does), in the row of the request's first token of the step."""
SEGMENT = OPENED + GATES
"""The column with the first token of the same request in this step, int32."""
STORED = SEGMENT + 4
"""The first column of values for `CARRIED`."""
MOST_STORED = 32
"""Number of such columns."""
GATE_COLUMNS = STORED + MOST_STORED
"""Number of columns; a multiple of four, for alignment."""
NEVER = 2**31 - 1
"""The token, or the position, at which a gate opens that has not opened."""
FIRES_ABOVE = 0.5
"""The gate above which a condition has fired: that of a value at the threshold."""
SMALLEST = 1.1754943508222875e-38
"""Smallest norm by which a value is divided."""
DEVIATION = 1e-5
"""Added to a standard deviation, as SAELens does in `layer_norm`."""


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
    threshold: torch.Tensor | None = None  # [r]; `SELECT`: [rivals]
    mask: torch.Tensor | None = None  # [H]; `SELECT`: [rivals, H]
    own_c0: torch.Tensor | None = None  # [r]
    own_c1: torch.Tensor | None = None  # [r]
    gate: int = NO_GATE
    """The gate column by which the instruction is multiplied, or that a probe
    writes."""
    stored: int = NO_GATE
    """`CARRIED`: the column of the value."""
    offset: int | None = None
    """If set, token t of the step reads and writes row t + offset."""
    doses: torch.Tensor | None = None  # [T], may be strided
    """Memory for the dose of each token of the step; None to store none."""
    fired: torch.Tensor | None = None  # [1], int64
    """`PROBE`: the number of tokens whose gate was above one half; None to count
    none."""

    @property
    def written(self) -> torch.Tensor:
        """The vectors that the instruction writes."""
        return self.read if self.write is None else self.write

    def words(self) -> npt.NDArray[np.int32]:
        """The instruction in the form that the kernel reads, `[WORDS]`."""
        made = np.zeros(WORDS, dtype=np.int32)
        longs, floats = made.view(np.int64), made.view(np.float32)
        flags = self.flags
        if self.write is not None:
            flags |= Flag.OTHER_WRITE
        if self.mask is not None:
            flags |= Flag.MASK
        if self.doses is not None:
            flags |= Flag.DOSE
            made[5] = self.doses.stride(0)
        if self.fired is not None:
            flags |= Flag.COUNT
        rank = 1 if self.offset is not None else len(self.read)
        made[:5] = self.kind, flags, rank, self.activation, self.gate
        made[25] = self.stored
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
            (15, self.doses),
        ):
            longs[place] = 0 if tensor is None else tensor.data_ptr()
        if self.fired is not None:  # Probes have no mask.
            longs[6] = self.fired.data_ptr()
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
"""Instructions, in the order of execution."""


def is_simple(program: Program) -> bool:
    """Whether it is one `LINEAR` instruction with, at most, a gate decided before."""
    if len(program) != 1 or program[0].kind != Kind.LINEAR:
        return False
    return program[0].doses is None and program[0].flags in SIMPLE


def words_of(program: Program) -> npt.NDArray[np.int32]:
    """A program as the kernel reads it, `[(1 + n) * WORDS]`.

    The first words are the number n of instructions and whether the program is simple.
    """
    head = np.zeros(WORDS, dtype=np.int32)
    head[:2] = len(program), is_simple(program)
    return np.concatenate([head, *(one.words() for one in program)])

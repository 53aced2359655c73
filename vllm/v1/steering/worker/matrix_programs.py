# SPDX-License-Identifier: Apache-2.0
"""Programs with one matrix row per token, whose row addresses change each step.

An instruction with a matrix reads row t + offset for token t of the step. Contiguous
tokens of a request use contiguous rows, so such a stretch shares one program. It is
made in each step from a template in which only addresses differ.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from vllm.model_executor.layers.residual.program import words_of
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.residual.tap import Tap
from vllm.v1.steering.plan import Operation
from vllm.v1.steering.worker.phase import Phase
from vllm.v1.steering.worker.programs import Placed, Programs

WORDS_OF_ADDRESS = 2
READ_AT = 4
"""Offset of the read address within an instruction, in 64-bit words."""


class Stretch(NamedTuple):
    """A stretch of contiguous tokens on which the same operations act."""

    phase: Phase
    active: frozenset[int]
    """Numbers of the active operations; some have one row per position."""
    prompt_length: int
    position: int
    """Position of the first token in its sequence."""
    token: int
    """Index of the first token in the step."""


class _Rows:
    """Maps positions to rows of an operation's matrix."""

    def __init__(self, one: Operation) -> None:
        assert one.positions is not None, "rows have positions"
        spans = np.array(one.positions, dtype=np.int64)
        self._firsts = spans[:, 0]
        lengths = spans[:, 1] - spans[:, 0]
        self._starts = np.cumsum(lengths) - lengths
        self._from_end = bool(spans[0, 0] < 0)

    def at(self, position: int, prompt_length: int) -> int:
        """The row of a position on which the operation acts."""
        place = position - prompt_length if self._from_end else position
        span = int(np.searchsorted(self._firsts, place, side="right")) - 1
        return int(self._starts[span] + place - self._firsts[span])


class Patch(NamedTuple):
    """An address that is filled in for each stretch."""

    at: int
    """Offset in the template, in 64-bit words."""
    number: int
    """Number of the operation."""
    base: int
    """Device address of the first row."""
    stride: int
    """Bytes from one row to the next."""


class Template:
    """The programs of a set of operations, without the addresses of rows."""

    def __init__(self, phase: Phase, active: frozenset[int]) -> None:
        self._fixed = phase.fixed
        self._rows = {
            number: _Rows(phase.operations[number]) for number in active & phase.by_row
        }
        self._programs = {
            tap: phase.numbered(tap, active) for tap in sorted(phase.taps_of(active))
        }
        """Instructions with their operations' numbers; their tensors must stay."""
        words: list[npt.NDArray[np.int32]] = []
        self._starts: dict[Tap, int] = {}
        self._patches: list[Patch] = []
        length = 0
        for tap, numbered in self._programs.items():
            program = words_of(tuple(made for _, made in numbered))
            self._starts[tap] = length
            each = len(program) // (1 + len(numbered))
            for place, (number, made) in enumerate(numbered):
                if made.offset is not None:
                    at = (length + (1 + place) * each) // WORDS_OF_ADDRESS + READ_AT
                    stride = made.read.stride(0) * made.read.element_size()
                    base = made.read.data_ptr()
                    self._patches.append(Patch(at, number, base, stride))
            words.append(program)
            length += len(program)
        self.words = np.concatenate(words)  # [words of all programs], int32

    def _offsets(self, stretch: Stretch) -> dict[int, int]:
        """By operation number, the offset from a token's index to its row."""
        position, length = stretch.position, stretch.prompt_length
        return {
            number: rows.at(position, length) - stretch.token
            for number, rows in self._rows.items()
        }

    def written(self, stretch: Stretch) -> npt.NDArray[np.int32]:
        """The words that a kernel reads for a stretch; the shape is that of `words`."""
        words = self.words.copy()
        longs = words.view(np.int64)
        offsets = self._offsets(stretch)
        for at, number, base, stride in self._patches:
            longs[at] = base + offsets[number] * stride
        return words

    def at(self, address: int, storage: torch.Tensor) -> Programs:
        """The programs of a stretch whose words are at a device address."""
        size = np.dtype(np.int32).itemsize
        placed = {
            tap: Placed((), address + start * size, storage)
            for tap, start in self._starts.items()
        }
        return {**self._fixed, **placed}


def place_stretches(
    stretches: Sequence[Stretch], device: torch.device
) -> list[Programs]:
    """Place the programs of all stretches of a step, in one copy to the device."""
    templates = [_template(one.phase, one.active) for one in stretches]
    pairs = list(zip(templates, stretches, strict=True))
    if not pairs:
        return []
    words = [template.written(one) for template, one in pairs]
    storage = async_tensor_h2d(np.concatenate(words), device, torch.int32)
    starts = np.cumsum([0, *map(len, words)]) * storage.element_size()
    return [
        template.at(storage.data_ptr() + int(start), storage)
        for template, start in zip(templates, starts, strict=False)
    ]


def _template(phase: Phase, active: frozenset[int]) -> Template:
    if active not in phase.templates:
        phase.templates[active] = Template(phase, active)
    return phase.templates[active]


def stretches_of(
    tokens: npt.NDArray[np.intp],
) -> list[npt.NDArray[np.intp]]:
    """Split ascending token indices into contiguous runs."""
    return np.split(tokens, np.flatnonzero(np.diff(tokens) != 1) + 1)

# SPDX-License-Identifier: Apache-2.0
"""Programs whose instructions read a row for each token: where the rows are.

An instruction with a matrix reads, for token t of the step, row t + offset. Tokens of a
request that follow one another have rows that do, so such a stretch has one program,
made anew in each step from what is the same in all: only addresses differ.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from vllm.model_executor.layers.residual.program import Instruction, Program, words_of
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.steering.operations import Operation
from vllm.v1.steering.plan import Tap
from vllm.v1.steering.worker.programs import Phase, Placed, Programs

WORDS_OF_ADDRESS = 2
READ_AT = 4
"""The place of the address of what is read, in longs of an instruction."""


class Stretch(NamedTuple):
    """Tokens that follow one another at which the same operations act."""

    phase: Phase
    active: frozenset[int]
    """By number; some have a row for each position."""
    prompt_length: int
    position: int
    """Of the first token, in its sequence."""
    token: int
    """Of the first token, in the step."""


class _Rows:
    """Which row of an operation belongs to a position."""

    def __init__(self, one: Operation) -> None:
        assert one.positions is not None, "rows have positions"
        spans = np.array(one.positions, dtype=np.int64)
        self._firsts = spans[:, 0]
        lengths = spans[:, 1] - spans[:, 0]
        self._starts = np.cumsum(lengths) - lengths
        self._from_end = bool(spans[0, 0] < 0)

    def at(self, position: int, prompt_length: int) -> int:
        """The row of a position that the operation has."""
        place = position - prompt_length if self._from_end else position
        span = int(np.searchsorted(self._firsts, place, side="right")) - 1
        return int(self._starts[span] + place - self._firsts[span])


class Patch(NamedTuple):
    """An address that differs between stretches."""

    at: int
    """Its place in the template, in longs."""
    number: int
    """Of the operation."""
    base: int
    """The address of the first row."""
    stride: int
    """Bytes from a row to the next."""


class Template:
    """The programs of a set of operations, but for where their rows are."""

    def __init__(self, phase: Phase, active: frozenset[int]) -> None:
        self._fixed = phase.fixed
        self._rows = {
            number: _Rows(phase.operations[number]) for number in active & phase.by_row
        }
        self._programs = {
            tap: phase.numbered(tap, active) for tap in sorted(phase.taps_of(active))
        }
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
        """By operation, what to add to a token of the step for its row."""
        position, length = stretch.position, stretch.prompt_length
        return {
            number: rows.at(position, length) - stretch.token
            for number, rows in self._rows.items()
        }

    def written(self, stretch: Stretch) -> npt.NDArray[np.int32]:
        """What a kernel reads for a stretch, as long as `words`."""
        words = self.words.copy()
        longs = words.view(np.int64)
        offsets = self._offsets(stretch)
        for at, number, base, stride in self._patches:
            longs[at] = base + offsets[number] * stride
        return words

    def at(self, address: int, storage: torch.Tensor) -> Programs:
        """The programs of a stretch whose words are at an address."""
        size = np.dtype(np.int32).itemsize
        placed = {
            tap: Placed((), address + start * size, storage)
            for tap, start in self._starts.items()
        }
        return {**self._fixed, **placed}

    def on_host(self, stretch: Stretch) -> Programs:
        """The programs of a stretch where no kernel reads them."""
        offsets = self._offsets(stretch)
        placed = {
            tap: Placed(_with_offsets(numbered, offsets), 0, None)
            for tap, numbered in self._programs.items()
        }
        return {**self._fixed, **placed}


def _with_offsets(
    numbered: Sequence[tuple[int, Instruction]], offsets: dict[int, int]
) -> Program:
    return tuple(
        made if made.offset is None else replace(made, offset=offsets[number])
        for number, made in numbered
    )


def place_stretches(
    stretches: Sequence[Stretch], device: torch.device
) -> list[Programs]:
    """The programs of each stretch of a step, in one copy to the device."""
    templates = [_template(one.phase, one.active) for one in stretches]
    pairs = list(zip(templates, stretches, strict=True))
    if device.type == "cpu":
        return [template.on_host(one) for template, one in pairs]
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
    """Ascending tokens, cut where they do not follow one another."""
    return np.split(tokens, np.flatnonzero(np.diff(tokens) != 1) + 1)

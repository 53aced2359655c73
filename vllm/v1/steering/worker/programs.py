# SPDX-License-Identifier: Apache-2.0
"""Programs on the device, and the index by which hook points find them."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from vllm.model_executor.layers.residual.capture_op import ALIGNMENT
from vllm.model_executor.layers.residual.program import (
    GATE_COLUMNS,
    Program,
    words_of,
)
from vllm.utils.math_utils import round_up
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.residual.tap import Tap


class Placed(NamedTuple):
    """A program and its place on the device."""

    program: Program
    address: int
    """The device address."""
    storage: torch.Tensor
    """Owns the memory at the address."""


Programs = dict[Tap, Placed]
"""The programs that a token passes, by hook point."""


def place(programs: Mapping[Tap, Program], device: torch.device) -> Programs:
    """Copy programs to the device."""
    if not programs:
        return {}
    words = [words_of(program) for program in programs.values()]
    storage = async_tensor_h2d(np.concatenate(words), device, torch.int32)
    starts = np.cumsum([0, *map(len, words)]) * storage.element_size()
    return {
        tap: Placed(program, storage.data_ptr() + int(start), storage)
        for (tap, program), start in zip(programs.items(), starts)
    }


class ProgramIndex:
    """Device index of programs by hook point and row, `[taps, rows]`, int64 addresses.

    The rows of configurations come first, as in the tables of vectors; the rows after
    them are for tokens on which operations with positions act, and are rewritten in
    each step. CUDA graphs hold the index's address.
    """

    def __init__(
        self,
        taps: Sequence[Tap],
        num_rows: int,
        num_tokens: int,
        device: torch.device,
    ) -> None:
        """Allocate an index without programs.

        Args:
            taps: the hook points of this process.
            num_rows: number of rows of configurations.
            num_tokens: of the largest step.
            device: of the residual stream.

        """
        self._columns = {tap: column for column, tap in enumerate(taps)}
        self.first_special = num_rows
        length = round_up(num_rows + num_tokens, ALIGNMENT // torch.int64.itemsize)
        self._index = torch.zeros(len(taps), length, dtype=torch.int64, device=device)
        self.gates = torch.zeros(num_tokens, GATE_COLUMNS, device=device)
        self._programs: dict[int, Programs] = {}

    def at(self, tap: Tap) -> torch.Tensor:
        """The index `[rows]` of one hook point."""
        return self._index[self._columns[tap]]

    @property
    def num_bytes(self) -> int:
        """Device memory of the index and the gates."""
        return self._index.nbytes + self.gates.nbytes

    def of_row(self, row: int) -> Programs:
        """The programs of a row."""
        return self._programs.get(row, {})

    def write(self, row: int, programs: Programs) -> None:
        """Set the programs of a configuration's row."""
        before = self._programs.get(row, {})
        self._programs[row] = programs
        if programs or before:
            self._write(row, [programs])

    def write_special(self, programs: Sequence[Programs]) -> None:
        """Set the programs of the rows for single tokens, from the first on."""
        for number, one in enumerate(programs):
            self._programs[self.first_special + number] = one
        self._write(self.first_special, programs)

    def _write(self, row: int, programs: Sequence[Programs]) -> None:
        if not programs:
            return
        addresses = np.zeros((len(self._columns), len(programs)), dtype=np.int64)
        for number, one in enumerate(programs):
            for tap, placed in one.items():
                addresses[self._columns[tap], number] = placed.address
        found = async_tensor_h2d(addresses, self._index.device, torch.int64)
        self._index[:, row : row + len(programs)] = found

# SPDX-License-Identifier: Apache-2.0
"""The optional native library, built from `csrc/`: row copies, programs.

Without it Python copies the same bytes, and a CPU executes no programs: steering cannot
be enabled there.
"""

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Protocol, TypeAlias, cast

import torch

from vllm.logger import init_logger

logger = init_logger(__name__)

Bytes: TypeAlias = bytes | bytearray | memoryview

MODULE = "vllm.v1.residual.native._native"

DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
"""The dtypes that native programs support, as numbered in `csrc/programs/run.h`."""

Rows: TypeAlias = tuple[int, int]
"""The address of a matrix, and the number of values from one row to the next."""
NO_ROWS: Rows = (0, 0)


class Library(Protocol):
    """The functions of `csrc/module.cpp`."""

    def gather_rows(
        self,
        copies: Sequence[tuple[int, int, int, int, int, int, int]],
        row_bytes: int,
        threads: int,
    ) -> None:
        """Copy rows between memory addresses; see `csrc/rows/gather.h`."""

    def run_programs(
        self,
        source: Rows,
        hidden: Rows,
        residual: Rows,
        gates: Rows,
        index: int,
        rows: int,
        tokens: int,
        width: int,
        first: int,
        dtype: int,
        leads: bool,
    ) -> None:
        """Execute each token's program, in place; see `csrc/programs/run.h`.

        Args:
            source: the stream's branch, `[tokens, width]`; may be `hidden`.
            hidden: this rank's part of it.
            residual: the pair's other half; `NO_ROWS` if there is none.
            gates: float32 `[tokens, columns]`.
            index: address of the index, int64.
            rows: address of each token's row of the index, int32.
            tokens: number of tokens.
            width: values per row.
            first: index of the first token in the step.
            dtype: a value of `DTYPES`, of the first three.
            leads: whether this rank writes the result.

        """


@cache
def library() -> Library | None:
    """The native library; None, with one warning, if it cannot be imported."""
    try:
        module = cast(Library, import_module(MODULE))
    except ImportError as error:
        logger.warning(
            "Captured rows are copied by Python code, because the native library was "
            "not built or does not work here: %s",
            error,
        )
        return None
    return module

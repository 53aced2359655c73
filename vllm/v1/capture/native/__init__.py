# SPDX-License-Identifier: Apache-2.0
"""Compiled encoders and copies of rows, from `csrc/`, where the fork has them.

Everything here has a Python form that gives the same bytes; the tests compare them.
"""

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Protocol, TypeAlias, cast

import torch

from vllm.logger import init_logger

logger = init_logger(__name__)

Bytes: TypeAlias = bytes | bytearray | memoryview

MODULE = "vllm.v1.capture.native._native"

DTYPES = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
}
"""What the codecs know; other dtypes take the Python path."""


class Library(Protocol):
    """What `csrc/bindings` offers."""

    def instruction_sets(self) -> list[str]:
        """What this CPU has, the widest last."""

    def encode_full8(
        self,
        rows: Bytes,
        dtype: str,
        num_rows: int,
        width: int,
        instructions: str | None = None,
    ) -> bytes:
        """The full8 records of rows."""

    def encode_topk8(
        self,
        rows: Bytes,
        dtype: str,
        num_rows: int,
        width: int,
        k: int,
        instructions: str | None = None,
    ) -> bytes:
        """The topk8 records of rows."""

    def gather_rows(
        self,
        copies: Sequence[tuple[int, int, int, int, int, int, int]],
        row_bytes: int,
        threads: int,
    ) -> None:
        """`csrc/rows/gather.h`, with addresses."""


@cache
def library() -> Library | None:
    """The compiled module; None where there is none, which is said once."""
    try:
        module = cast(Library, import_module(MODULE))
    except ImportError as error:
        logger.warning(
            "Captured rows are copied and encoded by Python code, as the fork was "
            "built without its native library or that does not fit here: %s",
            error,
        )
        return None
    return module

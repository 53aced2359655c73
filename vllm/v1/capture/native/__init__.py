# SPDX-License-Identifier: Apache-2.0
"""The compiled half of storage and of copies, from `csrc/`, where the fork has it.

Everything here has a Python form that gives the same bytes and files; the tests
compare them.
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


class FaultyDisk(Protocol):
    """For tests: takes so many bytes more, then is full; writes may hang."""

    def hang(self) -> None:
        """Let writes hang."""

    def release(self) -> None:
        """Let them go on."""


class Pool(Protocol):
    """`csrc/writer/pool.h`; ids are of jobs, None says that the queue stayed full."""

    held_bytes: int

    def publish(
        self,
        rows_aside: str,
        rows_name: str,
        rows: list[Bytes] | None,
        index_aside: str,
        index_name: str,
        index: Bytes,
        replace: bool,
        sync: bool,
        timeout: float,
    ) -> int | None:
        """Queue rows and their index to appear together."""

    def append(
        self, file: int, offset: int, data: list[Bytes], timeout: float
    ) -> int | None:
        """Queue bytes for an offset of an open file."""

    def cancel(self, job: int) -> bool:
        """True if the job will leave nothing."""

    def take(self, timeout: float) -> Sequence[tuple[int, int, str]]:
        """Done jobs: id, `errno` or 0, path."""

    def close(self, timeout: float) -> bool:
        """Work off the queue; False if that takes longer."""


class Library(Protocol):
    """What `csrc/bindings` offers."""

    def WriterPool(
        self,
        num_threads: int,
        max_bytes: int,
        max_call_bytes: int,
        disk: FaultyDisk | None = None,
    ) -> Pool:
        """Threads outside the GIL."""

    def FaultyDisk(self, free_bytes: int) -> FaultyDisk:
        """A disk for tests."""

    def instruction_sets(self) -> list[str]:
        """What this CPU has, the widest last."""

    def crc32c(self, data: Bytes, before: int = 0, use_tables: bool = False) -> int:
        """Checksum of `data` after what has the checksum `before`."""

    def encode_full8(
        self,
        rows: Bytes,
        dtype: str,
        num_rows: int,
        width: int,
        instructions: str | None = None,
    ) -> bytes:
        """The full8 records of rows."""

    def decode_full8(
        self,
        records: Bytes,
        dtype: str,
        num_rows: int,
        width: int,
        instructions: str | None = None,
    ) -> bytes:
        """Rows from full8 records."""

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
            "Captured rows are copied, encoded and written by Python code, as the fork "
            "was built without its native library or that does not fit here: %s",
            error,
        )
        return None
    return module

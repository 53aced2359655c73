# SPDX-License-Identifier: Apache-2.0
"""Rows of responses in shared memory, for clients on the same host.

Each response has anonymous, sealed files (`memfd_create(2)`): they have no name in a
file system, and neither their content nor their size can change. A client opens them by
their paths in `/proc`, which the kernel permits only to the same user and root. A
client's mappings stay valid after the files were freed here.

The files are written, because a write into new pages clears none of them, unlike an
access to a mapping. The kernel lets one thread at a time write to a file, therefore
each thread has a file of its own.
"""

import fcntl
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cache, partial
from secrets import token_urlsafe
from time import monotonic
from typing import Any

from vllm.logger import init_logger
from vllm.utils.math_utils import round_up
from vllm.v1.capture.delivery.row_bytes import write_all
from vllm.v1.capture.memory.budget import BUDGET
from vllm.v1.capture.memory.buffer_pool import threads_for
from vllm.v1.capture.transport.parts import Part
from vllm.v1.residual.machine import copy_threads

logger = init_logger(__name__)

KEPT_SECONDS = 60.0
"""Files that their client has not freed are closed after this time."""
SHARE = 4
"""The files may use the host memory budget divided by this."""
ALIGNMENT = 64
"""Bytes to which the rows of each part are aligned."""
SEALS = 0x0001 | 0x0002 | 0x0004 | 0x0008
"""`F_SEAL_SEAL`, `_SHRINK`, `_GROW`, `_WRITE`; see `fcntl(2)`."""
F_ADD_SEALS = 1033


@dataclass(frozen=True, slots=True, eq=False)
class Handout:
    """The files of one response."""

    token: str
    """Secret with which the client frees the files."""
    files: tuple["File", ...]
    ends: float = field(default_factory=lambda: monotonic() + KEPT_SECONDS)
    """Monotonic time at which they expire, in seconds."""

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    def refer(self, part: Part) -> dict[str, Any] | None:
        """The entry in the JSON document that tells a client where the rows are.

        None if they are in none of the files.
        """
        for file in self.files:
            if part.name in file.offsets:
                return {
                    "shm": {
                        "path": f"/proc/{os.getpid()}/fd/{file.number}",
                        "offset": file.offsets[part.name],
                        "nbytes": part.rows.nbytes,
                        "token": self.token,
                    }
                }
        return None

    def close(self) -> None:
        """Close the files; the memory is freed with the last mapping."""
        for file in self.files:
            os.close(file.number)


@dataclass(frozen=True, slots=True, eq=False)
class File:
    """An open file with the rows of some parts."""

    number: int
    """File descriptor."""
    size: int
    """In bytes."""
    offsets: dict[str, int]
    """Offset in bytes of each part's rows, by the part's name."""


class Handouts:
    """The open files; thread-safe."""

    def __init__(self, most_bytes: int) -> None:
        """Start without files, whose total size is limited to `most_bytes`."""
        self._most = most_bytes
        self._open: dict[str, Handout] = {}
        self._lock = threading.Lock()

    @property
    def held_bytes(self) -> int:
        """Bytes of all files."""
        with self._lock:
            return sum(handout.size for handout in self._open.values())

    def make(self, parts: Sequence[Part]) -> Handout | None:
        """Create files with the rows of `parts`; None if there is no memory."""
        self.expire()
        size = sum(map(aligned_bytes, parts))
        if self.held_bytes + size > self._most:
            logger.warning_once(
                "Responses in shared memory take more than %d MiB: others are sent as "
                "usual until clients have freed theirs",
                self._most >> 20,
            )
            return None
        try:
            handout = Handout(token_urlsafe(16), _written(parts, size))
        except OSError as error:
            logger.warning_once("No memory for a response: %s", error)
            return None
        with self._lock:
            self._open[handout.token] = handout
        return handout

    def free(self, token: str) -> bool:
        """Close the files of a token; False if there are none (any more)."""
        with self._lock:
            handout = self._open.pop(token, None)
        if handout is None:
            return False
        handout.close()
        return True

    def expire(self) -> None:
        """Close files that were not freed in time."""
        now = monotonic()
        with self._lock:
            old = [token for token, one in self._open.items() if one.ends < now]
        for token in old:
            self.free(token)


def aligned_bytes(part: Part) -> int:
    """Bytes that the rows of a part take in a file."""
    return round_up(part.rows.nbytes, ALIGNMENT)


def _written(parts: Sequence[Part], size: int) -> tuple[File, ...]:
    """Files with the rows of `parts`, which take `size` bytes."""
    files: list[File] = []
    shares = shared_out(parts, threads_for(size))
    try:
        in_parallel(partial(_write, share, files) for share in shares)
    except BaseException:
        for file in files:
            os.close(file.number)
        raise
    return tuple(files)


def in_parallel(tasks: Iterable[Callable[[], object]]) -> None:
    """Run tasks on threads, and wait for all of them, whatever they raise."""
    futures = [_pool().submit(task) for task in tasks]
    wait(futures)
    for future in futures:
        future.result()


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(copy_threads(), "capture-copy")


def shared_out(parts: Sequence[Part], count: int) -> list[list[Part]]:
    """Divide parts into 1 to `count` groups of about equal size, in order."""
    groups: list[list[Part]] = [[] for _ in range(count)]
    total = max(sum(map(aligned_bytes, parts)), 1)
    before = 0
    for part in parts:
        size = aligned_bytes(part)
        # By the middle of the part.
        groups[min((before + size // 2) * count // total, count - 1)].append(part)
        before += size
    return [group for group in groups if group] or [[]]


def _write(parts: Sequence[Part], files: list[File]) -> None:
    """Write the rows of `parts` to a file, which is added to `files`."""
    offsets: dict[str, int] = {}
    buffers: list[memoryview] = []
    size = 0
    for part in parts:
        offsets[part.name] = size
        padding = memoryview(bytes(aligned_bytes(part) - part.rows.nbytes))
        buffers += part.data, padding
        size += aligned_bytes(part)
    size = max(size, ALIGNMENT)
    number = os.memfd_create("vllm-answer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    files.append(File(number, size, offsets))
    os.ftruncate(number, size)
    write_all(number, filter(None, buffers), size)  # In one call.
    fcntl.fcntl(number, F_ADD_SEALS, SEALS)


HANDOUTS = Handouts(BUDGET.limit // SHARE)
"""The files of this process."""

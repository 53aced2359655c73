# SPDX-License-Identifier: Apache-2.0
"""Rows of responses in shared memory, for clients on the same host.

Each response has an anonymous, sealed file (`memfd_create(2)`): it has no name in a
file system, and neither its content nor its size can change. A client opens it by its
path in `/proc`, which the kernel permits only to the same user and root. A client's
mapping stays valid after the file was freed here.
"""

import fcntl
import mmap
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from secrets import token_urlsafe
from time import monotonic
from typing import Any

import numpy as np
import torch

from vllm.logger import init_logger
from vllm.v1.capture.delivery.row_bytes import write_all
from vllm.v1.capture.memory.budget import BUDGET
from vllm.v1.capture.memory.row_copy import copy_all, threads_for
from vllm.v1.capture.memory.shared import populate
from vllm.v1.capture.transport.parts import Part

logger = init_logger(__name__)

KEPT_SECONDS = 60.0
"""A file that its client has not freed is closed after this time."""
SHARE = 4
"""The files may use the host memory budget divided by this."""
ALIGNMENT = 64
"""Bytes to which the rows of each part are aligned."""
SEALS = 0x0001 | 0x0002 | 0x0004 | 0x0008
"""`F_SEAL_SEAL`, `_SHRINK`, `_GROW`, `_WRITE`; see `fcntl(2)`."""
F_ADD_SEALS = 1033


@dataclass(frozen=True, slots=True, eq=False)
class Handout:
    """The file of one response."""

    token: str
    """Secret with which the client frees the file."""
    file: int
    """File descriptor."""
    size: int
    """Bytes of the file."""
    offsets: dict[str, int]
    """Offset in bytes of each part's rows, by the part's name."""
    ends: float = field(default_factory=lambda: monotonic() + KEPT_SECONDS)
    """Monotonic time at which the file expires, in seconds."""

    def refer(self, part: Part) -> dict[str, Any]:
        """The entry in the JSON document that tells a client where the rows are."""
        return {
            "shm": {
                "path": f"/proc/{os.getpid()}/fd/{self.file}",
                "offset": self.offsets[part.name],
                "nbytes": part.rows.nbytes,
                "token": self.token,
            }
        }


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
        """Create a file with the rows of `parts`; None if there is no memory."""
        self.expire()
        offsets, size = {}, 0
        for part in parts:
            offsets[part.name] = size
            size += -(-part.rows.nbytes // ALIGNMENT) * ALIGNMENT
        size = max(size, ALIGNMENT)
        if self.held_bytes + size > self._most:
            logger.warning_once(
                "Responses in shared memory take more than %d MiB: others are sent as "
                "usual until clients have freed theirs",
                self._most >> 20,
            )
            return None
        try:
            file = _filled(parts, offsets, size)
        except OSError as error:
            logger.warning_once("No memory for a response: %s", error)
            return None
        handout = Handout(token_urlsafe(16), file, size, offsets)
        with self._lock:
            self._open[handout.token] = handout
        return handout

    def free(self, token: str) -> bool:
        """Close the file of a token; False if there is no such file (any more)."""
        with self._lock:
            handout = self._open.pop(token, None)
        if handout is None:
            return False
        os.close(handout.file)
        return True

    def expire(self) -> None:
        """Close files that were not freed in time."""
        now = monotonic()
        with self._lock:
            old = [token for token, one in self._open.items() if one.ends < now]
        for token in old:
            self.free(token)


def _filled(parts: Sequence[Part], offsets: dict[str, int], size: int) -> int:
    file = os.memfd_create("vllm-answer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        if threads_for(size) > 1:
            _copy_in_parallel(file, parts, offsets, size)
        else:
            # Written, not mapped: one thread takes half the time without page faults.
            os.ftruncate(file, size)
            for part in parts:
                write_all(file, [part.data], size, offsets[part.name])
        fcntl.fcntl(file, F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(file)
        raise
    return file


def _copy_in_parallel(
    file: int, parts: Sequence[Part], offsets: dict[str, int], size: int
) -> None:
    os.ftruncate(file, size)
    # Unmapped with the last reference, when this returns: only then it can be sealed.
    memory = np.frombuffer(mmap.mmap(file, size), dtype=np.uint8)
    populate(file, memory)  # A missing page would raise SIGBUS later.
    copy_all([_copy(part, memory, offsets[part.name]) for part in parts])


def _copy(part: Part, memory: Any, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = part.rows
    target = torch.from_numpy(memory[start : start + rows.nbytes])
    return target.view(rows.dtype).view(rows.shape), rows


HANDOUTS = Handouts(BUDGET.limit // SHARE)
"""The files of this process."""

# SPDX-License-Identifier: Apache-2.0
"""Answers' rows in memory that a client on the same host maps.

Each answer has a file of its own, which is anonymous and sealed: it has no name in
any file system, and nobody can change it, or make it longer or shorter. A client opens
it by its path in `/proc`, which the system allows processes of the same user (and
root), and only them. What a client has mapped stays whole for as long as it keeps it.
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
from vllm.v1.capture.memory.budget import BUDGET
from vllm.v1.capture.memory.parallel_copy import copy_all
from vllm.v1.capture.transport.parts import Part

logger = init_logger(__name__)

KEPT_SECONDS = 60.0
"""After that a file that no client has freed is closed."""
SHARE = 4
"""The files may take this part of the memory for rows."""
ALIGNMENT = 64
"""Bytes; rows of each part begin at multiples of it."""
SEALS = 0x0001 | 0x0002 | 0x0004 | 0x0008
"""`F_SEAL_SEAL`, `_SHRINK`, `_GROW`, `_WRITE`; see `fcntl(2)`."""
F_ADD_SEALS = 1033


@dataclass(frozen=True, slots=True, eq=False)
class Handout:
    """The file of one answer."""

    token: str
    """What frees it."""
    file: int
    size: int
    offsets: dict[str, int]
    """Where each part's rows begin, by the part's name."""
    ends: float = field(default_factory=lambda: monotonic() + KEPT_SECONDS)

    def refer(self, part: Part) -> dict[str, Any]:
        """Where a client finds a part's rows."""
        return {
            "shm": {
                "path": f"/proc/{os.getpid()}/fd/{self.file}",
                "offset": self.offsets[part.name],
                "nbytes": part.rows.nbytes,
                "token": self.token,
            }
        }


class Handouts:
    """The files that are open. Any thread may call."""

    def __init__(self, most_bytes: int) -> None:
        """All files together have at most `most_bytes`."""
        self._most = most_bytes
        self._open: dict[str, Handout] = {}
        self._lock = threading.Lock()

    @property
    def held_bytes(self) -> int:
        """Of all files."""
        with self._lock:
            return sum(handout.size for handout in self._open.values())

    def make(self, parts: Sequence[Part]) -> Handout | None:
        """A file with the rows of `parts`; None if there is no memory for it."""
        self.expire()
        offsets, size = {}, 0
        for part in parts:
            offsets[part.name] = size
            size += -(-part.rows.nbytes // ALIGNMENT) * ALIGNMENT
        size = max(size, ALIGNMENT)
        if self.held_bytes + size > self._most:
            logger.warning_once(
                "Answers in shared memory take more than %d MiB: others are sent as "
                "usual until clients have freed theirs",
                self._most >> 20,
            )
            return None
        try:
            file = _filled(parts, offsets, size)
        except OSError as error:
            logger.warning_once("No memory for an answer: %s", error)
            return None
        handout = Handout(token_urlsafe(16), file, size, offsets)
        with self._lock:
            self._open[handout.token] = handout
        return handout

    def free(self, token: str) -> bool:
        """The client has what it wants; False if there is no such file (any more)."""
        with self._lock:
            handout = self._open.pop(token, None)
        if handout is None:
            return False
        os.close(handout.file)
        return True

    def expire(self) -> None:
        """Close what was not freed in time."""
        now = monotonic()
        with self._lock:
            old = [token for token, one in self._open.items() if one.ends < now]
        for token in old:
            self.free(token)


def _filled(parts: Sequence[Part], offsets: dict[str, int], size: int) -> int:
    file = os.memfd_create("vllm-answer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(file, 0, size)  # A page missing later would be a signal.
        with mmap.mmap(file, size) as mapped:
            memory = np.frombuffer(mapped, dtype=np.uint8)
            copy_all([_copy(part, memory, offsets[part.name]) for part in parts])
            del memory
        fcntl.fcntl(file, F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(file)
        raise
    return file


def _copy(part: Part, memory: Any, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = part.rows
    target = torch.from_numpy(memory[start : start + rows.nbytes])
    return target.view(rows.dtype).view(rows.shape), rows


HANDOUTS = Handouts(BUDGET.limit // SHARE)
"""Of this process."""

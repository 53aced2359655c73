# SPDX-License-Identifier: Apache-2.0
"""Names that are taken in the other API server processes of a server.

They share nothing but their machine and the process that has started them, so a name
is a byte of a file, far apart from the others, that its process has locked. The
system frees what a process leaves behind.
"""

import fcntl
import hashlib
import os
from pathlib import Path

from vllm import envs


class NobodyElse:
    """There is one process only: no name is taken elsewhere."""

    def take(self, name: tuple[str, ...]) -> bool:
        """Take a name, if no other process has it."""
        return True

    def free(self, name: tuple[str, ...]) -> None:
        """Others may have the name."""


class OtherServers(NobodyElse):
    """The names that several processes take from each other; any thread may call.

    Within a process a name can be taken again: that is not noticed here.
    """

    def __init__(self, server: int) -> None:
        """Take nothing.

        Args:
            server: the id of the process that has started them all.

        """
        self._server = server
        path = Path(envs.VLLM_RPC_BASE_PATH, f"vllm-capture-names-{os.getuid()}")
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.open(path, flags, 0o600)

    def take(self, name: tuple[str, ...]) -> bool:
        """Take a name, if no other process has it."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._place(name))
        except (BlockingIOError, PermissionError):
            return False
        return True

    def free(self, name: tuple[str, ...]) -> None:
        """Others may have the name."""
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, self._place(name))

    def _place(self, name: tuple[str, ...]) -> int:
        """A byte that no other name has, so far as 62 bits can tell."""
        digest = hashlib.sha256(repr((self._server, name)).encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 2


def other_servers(count: int) -> NobodyElse:
    """What there is besides this process, of so many API servers."""
    return OtherServers(os.getppid()) if count > 1 else NobodyElse()

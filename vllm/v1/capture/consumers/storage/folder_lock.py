# SPDX-License-Identifier: Apache-2.0
"""Locks that show which directories belong to processes that are still running.

The owner of a directory holds a lock on a file next to it. The kernel releases the lock
when the process ends for any reason. Host names and process ids are not used, because
containers may have equal ones.
"""

import contextlib
import fcntl
import os
import shutil
from pathlib import Path

SUFFIX = ".lock"


class FolderLock:
    """The lock on `FOLDER.lock`, which is acquired before `FOLDER` is created."""

    def __init__(self, folder: Path) -> None:
        self._path = folder.with_name(folder.name + SUFFIX)
        self._file: int | None = None

    def acquire(self) -> None:
        """Create the file and lock it.

        On file systems without locks this has no effect, and no directory is removed.
        """
        while True:
            # Not inherited by programs that this process starts.
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            _try_lock(file)
            if _is_at(file, self._path):
                self._file = file
                return
            os.close(file)  # Another process removed the file before it was locked.

    def release(self) -> None:
        """Remove the file and release the lock."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
            os.close(self._file)
            self._file = None


def remove_abandoned(parent: Path) -> None:
    """Remove the directories in `parent` whose lock is not held, and their locks."""
    for path in sorted(parent.glob(f"*{SUFFIX}")):
        with contextlib.suppress(OSError):
            _remove_if_free(path)


def _remove_if_free(path: Path) -> None:
    # Without O_CREAT, and without following links.
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if _try_lock(file) and _is_at(file, path):
            shutil.rmtree(path.with_name(path.name.removesuffix(SUFFIX)), True)
            os.unlink(path)
    finally:
        os.close(file)


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_at(file: int, path: Path) -> bool:
    """Whether an open file is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False

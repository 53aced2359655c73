# SPDX-License-Identifier: Apache-2.0
"""Which folders below a shared one belong to processes that still run.

The owner holds a lock on a file beside its folder for as long as it lives. The system
frees the lock with the process, however that ends; names of hosts and numbers of
processes, of which containers may have equal ones, say nothing.
"""

import contextlib
import fcntl
import os
import shutil
from pathlib import Path

SUFFIX = ".lock"


class FolderLock:
    """The lock on `FOLDER.lock`, which is held before `FOLDER` is made."""

    def __init__(self, folder: Path) -> None:
        """Not locked yet."""
        self._path = _lock_of(folder)
        self._file: int | None = None

    def acquire(self) -> None:
        """Hold it from now on.

        On file systems without locks nobody holds any, and nobody's folder is removed.
        """
        while True:
            # Not inherited by programs that this process starts.
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            _try_lock(file)
            if _is_at(file, self._path):
                self._file = file
                return
            os.close(file)  # Another process took it for abandoned before it was held.

    def release(self) -> None:
        """Remove the file, and hold it no longer."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
            os.close(self._file)
            self._file = None


def remove_abandoned(parent: Path) -> None:
    """Remove the folders in `parent` whose locks nobody holds, with their locks."""
    for path in sorted(parent.glob(f"*{SUFFIX}")):
        with contextlib.suppress(OSError):
            _remove_if_free(path)


def _remove_if_free(path: Path) -> None:
    # Not made here, and no link is followed.
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if _try_lock(file) and _is_at(file, path):
            shutil.rmtree(path.with_name(path.name.removesuffix(SUFFIX)), True)
            os.unlink(path)
    finally:
        os.close(file)


def _lock_of(folder: Path) -> Path:
    return folder.with_name(folder.name + SUFFIX)


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_at(file: int, path: Path) -> bool:
    """Whether a file is the one that has this name."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False

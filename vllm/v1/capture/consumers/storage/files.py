# SPDX-License-Identifier: Apache-2.0
"""Files that are whole under their final name, whatever happens while they grow."""

import contextlib
import os
import shutil
import socket
from collections.abc import Iterable
from itertools import count
from pathlib import Path
from uuid import uuid4

from vllm.v1.capture.consumers.storage.folder_lock import (
    FolderLock,
    remove_abandoned,
)
from vllm.v1.capture.delivery.row_bytes import write_all
from vllm.v1.capture.native import Bytes

ASIDE = ".incomplete"
"""The folder below the root where files grow. Readers skip names with a dot."""

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL


def create_file(path: str) -> int:
    """A new file in a process's folder aside, open for writing.

    The folder is made again if it is gone with the one above, which happens when the
    root was emptied; the root itself is not, as it may be a mount point.
    """
    try:
        return os.open(path, _NEW, 0o644)
    except FileNotFoundError:
        folder = os.path.dirname(path)
        for missing in (os.path.dirname(folder), folder):
            with contextlib.suppress(FileExistsError):
                os.mkdir(missing)
        return os.open(path, _NEW, 0o644)


class Workspace:
    """The root, and a folder of this process below it in which files grow."""

    def __init__(self, root: Path) -> None:
        self.root = root
        # Host and process are for people who look; the lock says whether it runs.
        name = f"{socket.gethostname()}-{os.getpid()}-{uuid4().hex}"
        self.own: Path = root / ASIDE / name
        self._lock = FolderLock(self.own)
        self._numbers = count()
        self._made: set[Path] = set()

    def open(self) -> None:
        """Make the folder, and remove those of processes that no longer run."""
        # The root itself was made at start-up. If it is gone now, a disk is not
        # mounted, and filling whatever lies beneath would be wrong.
        parent = self.own.parent
        with contextlib.suppress(FileExistsError):
            parent.mkdir()
        self._lock.acquire()
        self.own.mkdir()
        remove_abandoned(parent)

    def close(self) -> None:
        """Remove what has not become whole."""
        shutil.rmtree(self.own, ignore_errors=True)
        self._lock.release()
        with contextlib.suppress(OSError):
            self.own.parent.rmdir()

    def aside(self) -> str:
        """A fresh path in this process's folder."""
        return f"{self.own}/{next(self._numbers)}.part"

    def create(self) -> tuple[str, int]:
        """A new file aside: its path and its descriptor, open for writing."""
        path = self.aside()
        return path, create_file(path)

    def folder(self, *parts: str) -> Path:
        """The folder `parts` below the root, made if it is not there.

        Raises:
            FileNotFoundError: the root is gone.

        """
        path = self.root.joinpath(*parts)
        if path not in self._made or not path.is_dir():
            path = self.root
            for part in parts:
                path = path / part
                with contextlib.suppress(FileExistsError):
                    path.mkdir()
            if len(self._made) > 10_000:
                self._made.clear()
            self._made.add(path)
        return path

    def write(self, buffers: Iterable[Bytes], max_bytes: int, fsync: bool) -> str:
        """A complete file aside; nothing is left of it if it cannot be written."""
        path, fd = self.create()
        try:
            write_all(fd, buffers, max_bytes)
            if fsync:
                os.fsync(fd)
        except BaseException:
            os.unlink(path)
            raise
        finally:
            os.close(fd)
        return path


def publish_pair(
    rows: tuple[str, str],
    index: tuple[str, str],
    *,
    replace: bool,
    fsync: bool,
) -> None:
    """Give rows and the index that describes them their names, each `(aside, final)`.

    Rows come first, so who sees the index can read the rows.

    Raises:
        OSError: neither has its name.

    """
    if replace and os.path.lexists(rows[1]):
        # A reader must not find old facts beside new rows.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(index[1])
    publish(*rows, replace=replace, fsync=False)
    try:
        publish(*index, replace=True, fsync=fsync)
    except BaseException:
        os.unlink(rows[1])
        raise


def publish(aside: str, final: str | Path, *, replace: bool, fsync: bool) -> None:
    """Give a file its name.

    Raises:
        FileExistsError: there is one, and it is not to be replaced.

    """
    try:
        if replace:
            os.replace(aside, final)
        else:
            _move_to_new(aside, final)
        if fsync:
            _sync_folder(os.path.dirname(final))
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(aside)
        raise


def _move_to_new(aside: str, final: str | Path) -> None:
    try:
        os.link(aside, final)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        if os.path.exists(final):
            raise FileExistsError(f"{final} exists already") from None
        os.rename(aside, final)
    else:
        os.unlink(aside)


def _sync_folder(folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

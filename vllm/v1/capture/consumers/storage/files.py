# SPDX-License-Identifier: Apache-2.0
"""The places of requests' files, which get their final name when they are complete."""

import contextlib
import fcntl
import os
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

from vllm.v1.capture.consumers.storage.folder_lock import (
    FolderLock,
    remove_abandoned,
)
from vllm.v1.capture.delivery.row_bytes import write_all
from vllm.v1.capture.errors import CaptureValidationError
from vllm.v1.residual.native import Bytes

ASIDE = ".incomplete"
"""Directory in the root for incomplete files; readers skip it."""

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL


def create_file(path: str) -> int:
    """Create a file in a process's directory for incomplete files, open for writing.

    If the directory is missing, because the root was emptied, it is created again with
    its parent. The root itself is not, as it may be a mount point.
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
    """The root, and this process's directory in it for incomplete files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        # Host and process id are informative only; the lock shows whether it is alive.
        name = f"{socket.gethostname()}-{os.getpid()}-{uuid4().hex}"
        self.own: Path = root / ASIDE / name
        self._lock = FolderLock(self.own)
        self._numbers = count()

    def open(self) -> None:
        """Create the directory, and remove those of processes that no longer run.

        Raises:
            OSError: the root is missing or not writable.

        """
        # The root was created at start-up. If it is missing now, a disk is probably not
        # mounted, and the mount point must not be written to.
        parent = self.own.parent
        with contextlib.suppress(FileExistsError):
            parent.mkdir()
        self._lock.acquire()
        self.own.mkdir()
        remove_abandoned(parent)

    def close(self) -> None:
        """Remove the directory with all incomplete files."""
        shutil.rmtree(self.own, ignore_errors=True)
        self._lock.release()
        with contextlib.suppress(OSError):
            self.own.parent.rmdir()

    def create(self) -> tuple[str, int]:
        """Create an incomplete file; returns its path and descriptor."""
        path = f"{self.own}/{next(self._numbers)}.part"
        return path, create_file(path)

    def folder(self, *parts: str) -> Path:
        """The directory `parts` below the root, created if it is missing.

        Raises:
            FileNotFoundError: the root is missing.

        """
        path = self.root.joinpath(*parts)
        if not path.is_dir():
            path = self.root
            for part in parts:
                path = path / part
                with contextlib.suppress(FileExistsError):
                    path.mkdir()
        return path

    def write(self, buffers: Iterable[Bytes], max_bytes: int, fsync: bool) -> str:
        """Write a file that still needs its final name; returns its path.

        Raises:
            OSError: the write failed; the file was removed.

        """
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


@contextlib.contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Lock a request's directory against other threads and processes that write to it.

    Two requests of one name, of two servers that share a root for example, would mix
    their files. On file systems without locks this has no effect.
    """
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def publish_pair(
    rows: tuple[str, str],
    index: tuple[str, str],
    *,
    replace: bool,
    fsync: bool,
) -> None:
    """Rename a file of rows and its index to their final names.

    The rows are renamed first, so that a reader who finds the index can read them.

    Args:
        rows: the current and the final path.
        index: the current and the final path.
        replace: whether existing files are replaced.
        fsync: whether to sync the directory.

    Raises:
        OSError: neither was renamed.

    """
    if replace and os.path.lexists(rows[1]):
        # A reader must not find the old index with new rows.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(index[1])
    publish(*rows, replace=replace, fsync=False)
    try:
        publish(*index, replace=True, fsync=fsync)
    except BaseException:
        os.unlink(rows[1])
        raise


def publish(aside: str, final: str | Path, *, replace: bool, fsync: bool) -> None:
    """Rename a complete file to its final name; on failure it is removed.

    Args:
        aside: the current path.
        final: the final path, in the same file system.
        replace: whether an existing file is replaced.
        fsync: whether to sync the directory.

    Raises:
        FileExistsError: the final path exists, and `replace` is false.
        OSError: renaming failed.

    """
    try:
        if replace:
            os.replace(aside, final)
        else:
            move_to_new(aside, final)
        if fsync:
            sync(os.path.dirname(final))
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(aside)
        raise


def move_to_new(aside: str, final: str | Path) -> None:
    """Rename a file to a name that is free, atomically where there are hard links.

    Raises:
        FileExistsError: the name is taken; the file is where it was.

    """
    try:
        os.link(aside, final)
    except FileExistsError:
        raise
    except OSError:  # The file system does not support hard links.
        if os.path.lexists(final):
            raise FileExistsError(f"{final} exists already") from None
        os.rename(aside, final)
    else:
        os.unlink(aside)


def sync(path: str) -> None:
    """Sync a file or a directory to disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


MAX_NAME = 200
"""Maximum number of characters of a name; file systems allow 255 bytes."""


def path_part(name: Any, where: str) -> str:
    """Convert `name` to one part of a path; only `[A-Za-z0-9._-]` is kept, else `_`.

    Raises:
        CaptureValidationError: the name is empty, too long, reserved, an absolute path,
            or refers to a parent directory.

    """
    why = ""
    if not isinstance(name, str) or not name.strip():
        why = "must be a name that is not empty"
    elif name.startswith("/") or name in (".", "..") or ".." in name.split("/"):
        why = (
            "must be a plain name: neither an absolute path nor a path to a parent "
            "folder"
        )
    elif name == ASIDE:
        why = f"must not be {ASIDE!r}, the folder of unfinished files"
    elif len(name) > MAX_NAME:
        why = f"has {len(name)} characters; at most {MAX_NAME} are allowed"
        name = name[:40] + "..."
    if why:
        raise CaptureValidationError(
            f"{where} {why}", parameter=where, value=repr(name)
        )
    return _plain(name)


def place_of(sidecar: dict[str, Any], default_tag: str) -> tuple[str, str]:
    """The tag and the name of the sample that a sidecar describes, as path parts."""
    spec = sidecar.get("client_spec") or {}
    name = _name(spec, sidecar["client_request_id"])
    if sidecar["num_samples"] > 1:
        name = f"{name}-{sidecar['sample_index']}"
    return _tag(spec, default_tag), name


def places_of(
    spec: Mapping[str, Any], client_request_id: str, num_samples: int, default_tag: str
) -> list[str]:
    """The paths `{tag}/{name}` of a request's samples.

    Two requests in flight must not share one; see `PathLocks`.
    """
    place = f"{_tag(spec, default_tag)}/{_name(spec, client_request_id)}"
    return [place] if num_samples == 1 else [f"{place}-{n}" for n in range(num_samples)]


def _tag(spec: Mapping[str, Any], default_tag: str) -> str:
    return path_part(spec.get("tag") or default_tag, "tag")


def _name(spec: Mapping[str, Any], client_request_id: str) -> str:
    """The `request_id` in the spec, otherwise a name made from the request's id."""
    given = spec.get("request_id")
    return path_part(given, "request_id") if given else _made(client_request_id)


def _plain(name: str) -> str:
    return "".join(
        c if c.isascii() and (c.isalnum() or c in "._-") else "_" for c in name
    )


def _made(request_id: str) -> str:
    """A valid name for any request id."""
    name = _plain(request_id)
    if len(name) > MAX_NAME:
        digest = sha256(request_id.encode(errors="backslashreplace")).hexdigest()[:16]
        return f"{name[: MAX_NAME - 17]}-{digest}"
    return f"_{name}" if name in ("", ".", "..", ASIDE) else name

# SPDX-License-Identifier: Apache-2.0
"""What a writer does in one go, and how it is done in Python.

`csrc/writer/job.cpp` does the same; this is the form that the tests compare it with,
and that runs where there is no native library.
"""

import contextlib
import errno
import os
import threading
from dataclasses import dataclass

from vllm.v1.capture.consumers.storage.files import (
    Bytes,
    create_file,
    publish,
    write_all,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """Rows and the index that describes them, to appear under their names together.

    Rows come first, so who sees the index can read the rows.
    """

    rows_aside: str
    rows_name: str
    rows: list[Bytes] | None
    """None: the file aside is complete already."""
    index_aside: str
    index_name: str
    index: bytes
    replace: bool
    """Whether rows of that name are replaced; else that is a `FileExistsError`."""
    fsync: bool

    @property
    def num_bytes(self) -> int:
        """Bytes to write."""
        return sum(map(len, self.rows or ())) + len(self.index)


@dataclass(frozen=True, slots=True)
class Append:
    """Bytes at an offset of an open file, which others append to at the same time."""

    file: int
    offset: int
    data: list[Bytes]

    @property
    def num_bytes(self) -> int:
        """Bytes to write."""
        return sum(map(len, self.data))


Job = Publication | Append


class Permit:
    """Whether a job may still take effect: it commits or is cancelled, once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._decision: str | None = None

    def cancel(self) -> bool:
        """True if the job did not commit before; it will leave nothing then."""
        return self._settle("cancelled")

    def commit(self) -> None:
        """From here on the job runs to its end.

        Raises:
            OSError: ECANCELED.

        """
        if not self._settle("committed"):
            raise cancelled()

    def _settle(self, wanted: str) -> bool:
        with self._lock:
            self._decision = self._decision or wanted
            return self._decision == wanted


def cancelled() -> OSError:
    """What becomes of a job that was cancelled."""
    return OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))


def run(job: Job, permit: Permit, max_bytes: int) -> None:
    """Do a job, with at most `max_bytes` a system call.

    Raises:
        OSError: nothing of it is left.

    """
    if isinstance(job, Publication):
        _publish(job, permit, max_bytes)
    else:
        write_all(job.file, job.data, max_bytes, job.offset)
        permit.commit()


def _publish(job: Publication, permit: Permit, max_bytes: int) -> None:
    written: list[str] = [job.rows_aside] if job.rows is None else []
    try:
        if job.rows is not None:
            _fill(job.rows_aside, job.rows, max_bytes, job.fsync, written)
        _fill(job.index_aside, [job.index], max_bytes, job.fsync, written)
        permit.commit()
        _name_both(job)
    except BaseException:
        for path in written:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        raise


def _fill(
    path: str, data: list[Bytes], max_bytes: int, fsync: bool, written: list[str]
) -> None:
    fd = create_file(path)
    written.append(path)
    try:
        write_all(fd, data, max_bytes)
        if fsync:
            os.fsync(fd)
    finally:
        os.close(fd)


def _name_both(job: Publication) -> None:
    if job.replace and os.path.lexists(job.rows_name):
        # A reader must not find old facts beside new rows.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(job.index_name)
    publish(job.rows_aside, job.rows_name, replace=job.replace, fsync=False)
    try:
        publish(job.index_aside, job.index_name, replace=True, fsync=job.fsync)
    except BaseException:
        os.unlink(job.rows_name)
        raise

# SPDX-License-Identifier: Apache-2.0
"""Native and Python writers leave the same files and give the same answers."""

import errno
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.v1.capture.consumers.storage.jobs import Append, Job, Publication
from vllm.v1.capture.consumers.storage.writers import (
    NativeWriters,
    PythonWriters,
    WriterLimits,
    Writers,
)
from vllm.v1.capture.native import FaultyDisk, library

WAIT = 30.0


def native_writers(
    limits: WriterLimits, disk: FaultyDisk | None = None
) -> NativeWriters:
    native = library()
    assert native is not None, "fork build leaves the native library out here"
    sizes = limits.num_threads, limits.max_bytes, limits.max_call_bytes
    return NativeWriters("test", native.WriterPool(*sizes, disk))


def limits(**changes: int) -> WriterLimits:
    values = {"num_threads": 2, "max_bytes": 1 << 20, "max_call_bytes": 1 << 20}
    return WriterLimits(**values | changes)


class Answers:
    """Submits jobs, keeps what becomes of them."""

    def __init__(self, writers: Writers) -> None:
        self.writers = writers
        self.errors: dict[int, OSError | None] = {}
        self._arrived = threading.Condition()

    def submit(self, number: int, job: Job) -> object:
        def answer(error: OSError | None) -> None:
            with self._arrived:
                self.errors[number] = error
                self._arrived.notify_all()

        return self.writers.submit(job, answer, WAIT)

    def wait(self, count: int) -> None:
        with self._arrived:
            assert self._arrived.wait_for(lambda: len(self.errors) == count, WAIT)

    def codes(self) -> list[int | None]:
        return [
            None if error is None else error.errno
            for _, error in sorted(self.errors.items())
        ]


def publication(
    folder: Path, name: str, rows: list[bytes] | None, **more: object
) -> Job:
    fields = {
        "rows_aside": f"{folder}/aside/own/{name}.rows",
        "rows_name": f"{folder}/{name}.bin",
        "rows": rows,
        "index_aside": f"{folder}/aside/own/{name}.index",
        "index_name": f"{folder}/{name}.json",
        "index": b"index of " + name.encode(),
        "replace": True,
        "fsync": False,
    }
    return Publication(**fields | more)  # type: ignore[arg-type]


def tree(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


parts = st.lists(st.binary(max_size=40), max_size=6)


@settings(deadline=None, max_examples=40)
@given(
    jobs=st.lists(
        st.tuples(st.sampled_from("abc"), parts, st.booleans(), st.booleans()),
        max_size=5,
    ),
    max_call_bytes=st.integers(1, 64),
)
def test_publications_leave_the_same_files(
    jobs: list[tuple[str, list[bytes], bool, bool]], max_call_bytes: int
) -> None:
    seen = []
    for make in (native_writers, lambda limits: PythonWriters("test", limits)):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            # One thread: jobs of one name have an order then.
            writers = make(limits(num_threads=1, max_call_bytes=max_call_bytes))
            answers = Answers(writers)
            for number, (file, rows, replace, fsync) in enumerate(jobs):
                more = {"replace": replace, "fsync": fsync}
                answers.submit(number, publication(folder, file, rows, **more))
            assert writers.close(WAIT)
            answers.wait(len(jobs))
            seen.append((answers.codes(), tree(folder)))
    assert seen[0] == seen[1]
    codes, files = seen[0]
    expected: dict[str, bytes] = {}
    for code, (file, rows, replace, _) in zip(codes, jobs):
        taken = f"{file}.bin" in expected
        assert code == (errno.EEXIST if taken and not replace else None)
        if code is None:
            expected[f"{file}.bin"] = b"".join(rows)
            expected[f"{file}.json"] = b"index of " + file.encode()
    assert files == expected


@settings(deadline=None, max_examples=40)
@given(
    blocks=st.lists(parts, max_size=8),
    max_call_bytes=st.integers(1, 64),
    free=st.one_of(st.none(), st.integers(0, 400)),
)
def test_appends_fill_their_places_or_say_why_not(
    blocks: list[list[bytes]], max_call_bytes: int, free: int | None
) -> None:
    native = library()
    assert native is not None
    disk = None if free is None else native.FaultyDisk(free)
    with tempfile.TemporaryFile() as file:
        writers = native_writers(limits(max_call_bytes=max_call_bytes), disk)
        answers, offset = Answers(writers), 0
        for number, block in enumerate(blocks):
            answers.submit(number, Append(file.fileno(), offset, list(block)))
            offset += sum(map(len, block))
        assert writers.close(WAIT)
        answers.wait(len(blocks))
        start = 0
        for code, block in zip(answers.codes(), blocks):
            data = b"".join(block)
            got = os.pread(file.fileno(), len(data), start)
            if code is None:
                assert got == data
            else:
                assert free is not None and code == errno.ENOSPC
                assert not any(got)  # nothing of it is left
            start += len(data)
    if free is None or free >= offset:
        assert not any(answers.codes())


@pytest.mark.parametrize("fault", ["full", "no folder", "no root"])
def test_a_failed_publication_leaves_nothing(tmp_path: Path, fault: str) -> None:
    native = library()
    assert native is not None
    root = tmp_path / ("gone" if fault == "no root" else ".")
    disk = native.FaultyDisk(12 if fault == "full" else 1 << 20)
    more = {"rows_name": f"{root}/no/such.bin"} if fault == "no folder" else {}
    answers = Answers(native_writers(limits(), disk))
    answers.submit(0, publication(root, "a", [b"eight by", b"tes"], **more))
    answers.wait(1)
    error = answers.errors[0]
    assert isinstance(error, OSError)
    assert error.errno == (errno.ENOSPC if fault == "full" else errno.ENOENT)
    assert error.filename.startswith(str(tmp_path))
    assert tree(tmp_path) == {}
    assert not (tmp_path / "gone").exists()
    assert answers.writers.close(WAIT)


def test_rows_written_before_are_published_or_removed(tmp_path: Path) -> None:
    for writers in (native_writers(limits()), PythonWriters("test", limits())):
        aside = tmp_path / "rows"
        answers = Answers(writers)
        for number, name in enumerate(("ok", "no/folder")):
            aside.write_bytes(b"rows")
            final = f"{tmp_path}/{name}.bin"
            more = {"rows_aside": str(aside), "rows_name": final}
            answers.submit(number, publication(tmp_path, "a", None, **more))
            answers.wait(number + 1)
            assert not aside.exists()
        assert answers.codes() == [None, errno.ENOENT]
        assert tree(tmp_path) == {"ok.bin": b"rows", "a.json": b"index of a"}
        (tmp_path / "a.json").unlink()
        assert writers.close(WAIT)


def test_a_full_queue_takes_nothing_and_a_cancelled_job_leaves_nothing(
    tmp_path: Path,
) -> None:
    native = library()
    assert native is not None
    disk = native.FaultyDisk(1 << 20)
    disk.hang()
    writers = native_writers(limits(num_threads=1, max_bytes=100), disk)
    answers = Answers(writers)
    cancels = [
        answers.submit(number, publication(tmp_path, name, [bytes(30)]))
        for number, name in enumerate("ab")
    ]
    third = publication(tmp_path, "c", [bytes(30)])
    assert writers.submit(third, lambda error: None, 0.1) is None
    for cancel in cancels:
        assert callable(cancel) and cancel()
    disk.release()
    answers.wait(2)
    assert answers.codes() == [errno.ECANCELED] * 2
    assert tree(tmp_path) == {}
    assert answers.submit(2, third)  # there is room again
    answers.wait(3)
    assert sorted(tree(tmp_path)) == ["c.bin", "c.json"]
    assert writers.close(WAIT)
    assert answers.submit(3, third) is None  # closed


EXITING = """
import threading, time
from vllm.v1.capture.native import library

native = library()
pool = native.WriterPool(2, 1 << 20, 1 << 20)
rows = bytes(1 << 20)

def take():
    while True:
        pool.take(0.001)

def encode():
    while True:
        native.crc32c(rows)
        native.encode_full8(rows, "bfloat16", 128, 4096)

for work in (take, encode, take, encode):
    threading.Thread(target=work, daemon=True).start()
time.sleep(0.2)
"""


def test_threads_at_work_do_not_disturb_the_end_of_the_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXITING], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr

# SPDX-License-Identifier: Apache-2.0
"""Disks that fill, vanish or hang: every lost row is reported, no file is torn."""

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.v1.capture.consumers._drive import (
    Fed,
    chunks_of,
    consumer_at,
    deliver,
    rows_of,
)
from vllm.v1.capture.consumers.filesystem import read_request
from vllm.v1.capture.consumers.filesystem.types import LAYOUTS
from vllm.v1.capture.consumers.storage import sink, stored_request
from vllm.v1.capture.consumers.storage.stored_request import RequestRows
from vllm.v1.capture.delivery import row_bytes
from vllm.v1.capture.delivery.spill import RowFiles
from vllm.v1.capture.types import CaptureResult

TAPS = [(layer, "post_block") for layer in range(4)]


def request_rows(seed: int) -> dict[tuple[int, str], torch.Tensor]:
    return {tap: rows_of(6, 32, seed + tap[0], torch.float32) for tap in TAPS}


UNLIMITED = 1 << 60


class Disk:
    """A disk with `free` bytes left, whose writes may hang."""

    def __init__(self, free: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free = free
        self._moves = threading.Event()
        self._moves.set()
        self._pwritev = os.pwritev
        monkeypatch.setattr(row_bytes.os, "pwritev", self._write)

    def hang(self) -> None:
        self._moves.clear()

    def release(self) -> None:
        self._moves.set()

    def _write(self, fd: int, buffers: Any, offset: int) -> int:
        assert self._moves.wait(20)
        if self.free <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        data = b"".join(bytes(buffer) for buffer in buffers)[: self.free]
        self.free -= len(data)
        return self._pwritev(fd, [data], offset)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("free", [0, 700, 3300, 7000])
@pytest.mark.parametrize("buffer_bytes", [100, 1 << 20])
def test_a_full_disk_leaves_whole_files_and_says_what_is_lost(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    free: int,
    buffer_bytes: int,
) -> None:
    requests = {f"r{i}": request_rows(10 * i) for i in range(4)}
    Disk(free, monkeypatch)
    consumer = consumer_at(
        tmp_path, default_layout=layout, buffer_bytes=buffer_bytes, num_shards=1
    )
    results = deliver(consumer, requests)
    monkeypatch.undo()
    assert "error" in {result.status for result in results.values()} | (
        {"error"} if "partial_error" in {r.status for r in results.values()} else set()
    )
    for request_id, rows in requests.items():
        result = results[request_id]
        if result.status == "error":
            assert "No space left" in result.error
            with pytest.raises(FileNotFoundError):
                read_request(tmp_path, "default", request_id)
            continue
        got = read_request(tmp_path, "default", request_id)
        for tap, tensor in got.items():
            assert torch.equal(tensor, rows[tap])
        if result.status == "ok":
            assert got.keys() == rows.keys()
    assert not (tmp_path / ".incomplete").exists()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_root_that_vanishes_is_reported_and_may_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    Disk(UNLIMITED, monkeypatch)
    root = tmp_path / "captures"
    fed = Fed(consumer_at(root, default_layout=layout))

    def sent(request_id: str) -> CaptureResult:
        fed.send(request_id, request_rows(0))
        limit = time.monotonic() + 20
        while request_id not in fed.answers and time.monotonic() < limit:
            time.sleep(0.01)
        return fed.answers[request_id]

    assert sent("before").status == "ok"
    shutil.rmtree(root)
    lost = sent("lost")
    assert lost.status == "error"
    assert "FileNotFoundError" in lost.error
    assert not root.exists()  # the file system under a missing mount is not filled
    root.mkdir()
    assert sent("after").status == "ok"
    fed.lane.close(20)
    assert read_request(root, "default", "after").keys() == set(TAPS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_writer_that_hangs_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    disk = Disk(UNLIMITED, monkeypatch)
    disk.hang()
    params = {"timeout_seconds": 0.5, "writer_threads": 1, "default_layout": layout}
    fed = Fed(consumer_at(tmp_path, **params))
    begin = time.monotonic()
    for name in ("a", "b"):
        fed.send(name, request_rows(0))
    while len(fed.answers) < 2 and time.monotonic() - begin < 40:
        time.sleep(0.02)
    assert len(fed.answers) == 2, "they still wait for the disk"
    for result in fed.answers.values():
        assert result.status == "error"
        assert "timeout_seconds" in result.error
    disk.release()
    fed.lane.close(20)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_stop_waits_for_no_disk_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(UNLIMITED, monkeypatch)
    disk.hang()
    fed = Fed(consumer_at(tmp_path))
    fed.send("r", request_rows(0))
    begin = time.monotonic()
    fed.lane.close(1)
    assert time.monotonic() - begin < 30
    assert fed.answers["r"].status == "error"
    assert "server stopped" in fed.answers["r"].error
    disk.release()
    time.sleep(0.3)  # time for files that might still appear
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_disk_that_takes_nothing_holds_the_caller_up_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(UNLIMITED, monkeypatch)
    disk.hang()
    consumer = consumer_at(tmp_path, timeout_seconds=2.0, buffer_bytes=64)
    begin = time.monotonic()
    for number in range(10):
        for tap, tensor in request_rows(0).items():
            consumer.submit_rows(chunks_of(f"r{number}", tap, tensor, 6))
    assert time.monotonic() - begin < 15, "each request has waited"
    disk.release()
    consumer.shutdown(20)


def test_a_request_without_layers_here_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[Any] = []
    monkeypatch.setattr(
        stored_request.logger, "error", lambda *words: said.append(words)
    )
    consumer = consumer_at(tmp_path)
    consumer.submit_request_end("elsewhere", ())
    settled: list[str] = []
    consumer.when_done("elsewhere", lambda: settled.append("elsewhere"))
    consumer.shutdown(20)
    assert settled == ["elsewhere"] and not said


def test_rows_lost_before_they_are_spilled_do_not_show_that_the_disk_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = consumer_at(tmp_path, timeout_seconds=0.1, buffer_bytes=64)
    late: list[Callable[[], None]] = []

    def put(task: Callable[[], None], timeout: float) -> bool:
        late.append(task)
        return True

    monkeypatch.setattr(consumer._executor, "put", put)
    waits: list[bool] = []
    waited = consumer._budget._changed.wait_for

    def noted(fits: Callable[[], bool], timeout: float) -> bool:
        waits.append(True)
        return waited(fits, timeout)

    monkeypatch.setattr(consumer._budget._changed, "wait_for", noted)
    ((tap, tensor), *_) = request_rows(0).items()
    for number in range(3):
        consumer.submit_rows(chunks_of(f"r{number}", tap, tensor, 6))
        late.pop()()
    assert len(waits) == 1, "each request has waited"
    consumer.shutdown(20)


def test_rows_that_could_not_be_spilled_stay_counted_until_they_are_discarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Disk(0, monkeypatch)
    rows, files = RequestRows(), RowFiles(tmp_path)
    ((tap, tensor), *_) = request_rows(0).items()
    rows.add([tap], tensor[None])
    with pytest.raises(OSError, match="No space left"):
        rows.spill(files)
    assert rows.spill(files) == 0, "another thread may try before it is discarded"
    assert rows.discard() == tensor.nbytes


def test_rows_that_are_spilled_as_they_come_are_counted_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = consumer_at(tmp_path, buffer_bytes=8192)
    add = RequestRows.add

    def spilled_at_once(rows: RequestRows, *added: Any) -> None:
        add(rows, *added)
        consumer._spill(consumer._request("r"))

    monkeypatch.setattr(RequestRows, "add", spilled_at_once)
    for tap, tensor in request_rows(0).items():
        consumer.submit_rows(chunks_of("r", tap, tensor, 3))
    assert consumer._budget.held == 0
    assert consumer.rewritten_bytes() == sum(
        tensor.nbytes for tensor in request_rows(0).values()
    )
    consumer.shutdown(20)


def test_rows_are_not_spilled_to_make_room_beside_what_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spilled: list[str] = []
    spill = RequestRows.spill

    def noted(rows: RequestRows, files: RowFiles) -> int:
        spilled.append("once")
        return spill(rows, files)

    monkeypatch.setattr(RequestRows, "spill", noted)
    consumer = consumer_at(tmp_path, buffer_bytes=8192, writer_threads=1)
    publish = consumer._publish
    monkeypatch.setattr(
        consumer, "_publish", lambda request: (time.sleep(0.2), publish(request))
    )
    fed = Fed(consumer)
    for number in range(6):  # of 3 KiB each
        fed.send(f"r{number}", request_rows(number))
    fed.lane.close(30)
    assert not spilled
    assert [result.status for result in fed.answers.values()] == ["ok"] * 6


def test_spilled_rows_are_counted_logged_and_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[tuple[Any, ...]] = []
    monkeypatch.setattr(sink.logger, "warning", lambda *what: said.append(what))
    fed = Fed(consumer_at(tmp_path, buffer_bytes=2048, default_layout="packed"))
    rows = request_rows(0)  # of 3 KiB
    fed.send("r", rows)
    fed.lane.close(20)
    assert fed.answers["r"].status == "ok"
    assert fed.lane.counters().rewritten_bytes >= 1024
    assert len(said) == 1 and "written twice" in said[0][0]
    for tap, tensor in read_request(tmp_path, "default", "r").items():
        assert torch.equal(tensor, rows[tap])
    assert not (tmp_path / ".incomplete").exists()


def test_requests_that_never_end_leave_nothing(tmp_path: Path) -> None:
    consumer = consumer_at(tmp_path, buffer_bytes=64)
    for tap, tensor in request_rows(0).items():
        consumer.submit_rows(chunks_of("r", tap, tensor, 6))
    consumer.shutdown(20)
    assert not list(tmp_path.rglob("*"))


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"capture_error": "only 1 of 6 rows arrived"}, "only 1 of 6"),
        ({"num_rows": 7}, "only 6 of 7 rows"),
    ],
)
def test_rows_that_are_not_complete_are_not_published(
    tmp_path: Path, facts: dict[str, Any], said: str
) -> None:
    results = deliver(consumer_at(tmp_path), {"r": request_rows(0)}, **facts)
    assert results["r"].status == "error"
    assert said in results["r"].error
    assert not list(tmp_path.rglob("*.bin"))

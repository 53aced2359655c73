# SPDX-License-Identifier: Apache-2.0
"""Servers that stop or crash while requests are captured."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from time import sleep
from typing import Any

import psutil
import pytest

from tests.support.server import OWN_WORKER, SHORT, Server
from tests.support.waiting import until
from vllm.v1.capture.consumers.filesystem import read_request

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


class Streaming:
    """A client that reads a long, captured stream on a separate thread."""

    def __init__(self, server: Server, name: str) -> None:
        self.chunks: list[Any] = []
        self._thread = threading.Thread(
            target=self._read, args=(server, body(name, 240))
        )
        self._thread.start()

    def _read(self, server: Server, request: dict[str, Any]) -> None:
        with suppress(Exception):  # The server may end.
            for chunk in server.stream("/v1/completions", request):
                self.chunks.append(chunk)

    def wait_for_chunks(self, number: int) -> None:
        until(lambda: len(self.chunks) >= number)

    def has_ended(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()


def body(name: str, max_tokens: int) -> dict[str, Any]:
    spec = {"request_id": name, "tag": "stops", "hooks": {"post_block": "all"}}
    capture = {"filesystem": spec | {"positions": "all"}}
    given = {"prompt": [20, 30, 40], "max_tokens": max_tokens, "capture": capture}
    return SHORT | given


@pytest.fixture
def server(capture_model: Path, tmp_path: Path) -> Iterator[Server]:
    opened = Server(
        capture_model,
        *("--capture-consumers", f"filesystem:root={tmp_path}"),
        *("--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", "256", "--max-num-seqs", "4", "--enable-steering"),
        **OWN_WORKER,
    )
    yield opened
    opened.close()


def files(root: Path) -> set[Path]:
    return {path for path in root.rglob("*") if path.is_file()}


@pytest.mark.last
def test_a_server_that_is_stopped_flushes_or_reports_its_captures(
    capture_server: Server, capture_root: Path
) -> None:
    server = capture_server
    running = Streaming(server, "running")
    running.wait_for_chunks(3)
    for number in range(5):  # No request waits for their files.
        assert server.post("/v1/completions", body(f"r{number}", 4)).status == 200
    server.close()
    assert running.has_ended(30)
    for number in range(5):
        rows = read_request(capture_root, "stops", f"r{number}")
        assert [tuple(each.shape) for each in rows.values()] == [(6, 64)] * 3
    log = server.log.read_text()
    whole = (capture_root / "stops" / "running").exists()
    reported = "requests are being captured; their captures fail: ['cmpl-" in log
    assert whole or reported, log[-3000:]
    suffixes = {path.suffix for path in files(capture_root / "stops")}
    assert suffixes == {".bin", ".json"}, "something is left that is not whole"


def test_a_worker_that_is_killed_hangs_no_client(
    server: Server, tmp_path: Path
) -> None:
    running = Streaming(server, "running")
    running.wait_for_chunks(3)
    workers = [
        process
        for process in psutil.Process(server.pid).children(recursive=True)
        if "Worker" in process.name() or "Worker" in " ".join(process.cmdline())
    ]
    assert workers, "no worker process was found"
    for process in workers:
        process.suspend()
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(server.get, "/v1/steering")  # Waits for the engine.
        sleep(1)
        for process in workers:
            process.kill()
        assert asked.result(60).status == 500
    assert running.has_ended(60), "the client of a dead engine still waits"
    assert len(running.chunks) < 240
    assert not (tmp_path / "stops" / "running").exists()
    with pytest.raises((OSError, AssertionError)):
        status = server.post("/v1/completions", body("after", 2)).status
        assert status == 200
    assert server.ends_within(100), "a server without an engine goes on"

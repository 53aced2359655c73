# SPDX-License-Identifier: Apache-2.0
"""Rows are passed between processes by handle, and their memory is returned."""

import asyncio
import gc
import json
import os
import queue
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Event, current_thread
from time import monotonic, sleep
from typing import Any

import pytest
import torch

from tests.v1.capture.transport._worker import SPARE, WIDTH
from vllm.v1.capture.transport import borrower, lender, zmq_channel
from vllm.v1.capture.transport.zmq_channel import Inbox, Message, ResultMessage

WAIT = 200.0
ROWS = 64
SENT = 2 * ROWS * WIDTH * 4
BLOCK = 2 * (ROWS + SPARE) * WIDTH * 4


class Worker:
    """A worker in another process."""

    def __init__(self, address: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("_worker.py"), address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def ask(self, what: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()

    def lent(self) -> dict[str, int]:
        assert self.process.stdout is not None
        self.ask("lent")
        return json.loads(self.process.stdout.readline())

    def wait_until_free(self) -> None:
        deadline = monotonic() + WAIT
        while self.lent()["leases"]:
            assert monotonic() < deadline, "a lease was not given back"
            sleep(0.02)

    def close(self) -> None:
        with self.process:
            self.process.kill()


class Pair(Worker):
    """A worker, and its front end in this process."""

    def __init__(self) -> None:
        self.came: queue.Queue[Message] = queue.Queue()
        self.inbox = Inbox(self.came.put)
        super().__init__(self.inbox.address)

    def rows(self, rows: int = ROWS) -> dict[Any, torch.Tensor]:
        self.ask(rows)
        message = self.came.get(timeout=WAIT)
        assert isinstance(message, ResultMessage)
        return message.result().payload

    def close(self) -> None:
        super().close()
        self.inbox.close()


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    opened = Pair()
    yield opened
    opened.close()


def check(rows: dict[Any, torch.Tensor], count: int = ROWS) -> None:
    for (layer, _), tensor in rows.items():
        wanted = (torch.arange(count) + 1000 * layer).float()
        assert tensor.shape == (count, WIDTH)
        assert torch.equal(tensor, wanted[:, None].expand(count, WIDTH))


def test_rows_arrive_by_handle_and_are_lent_until_the_last_view_is_gone(
    pair: Pair,
) -> None:
    before = pair.lent()
    rows = pair.rows()
    check(rows)
    after = pair.lent()
    assert after["lent_bytes"] - before["lent_bytes"] == SENT
    assert after["copied_bytes"] == before["copied_bytes"]
    assert after["leases"] == 1 and after["held_by_front_ends_bytes"] == BLOCK
    view = rows[1, "post_block"][5:6]
    del rows
    gc.collect()
    sleep(0.3)
    assert pair.lent()["leases"] == 1, "a view was still held"
    assert torch.equal(view, torch.full((1, WIDTH), 1005.0))
    del view
    pair.wait_until_free()


def test_an_event_loop_leaves_the_unmapping_to_a_thread(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.wait_until_free()
    threads: list[str] = []
    drop = borrower.Connection.drop

    def dropped(connection: borrower.Connection, lease: int) -> None:
        threads.append(current_thread().name)
        drop(connection, lease)

    monkeypatch.setattr(borrower.Connection, "drop", dropped)
    rows = pair.rows()
    held = [rows]
    del rows

    async def forget() -> None:
        held.clear()
        gc.collect()

    asyncio.run(forget())
    pair.wait_until_free()
    assert threads == ["capture-unmap"]
    pair.rows()
    pair.wait_until_free()
    assert threads == ["capture-unmap", current_thread().name]


def test_writes_of_a_caller_are_private(pair: Pair) -> None:
    rows = pair.rows()
    kept = pair.rows()
    for tensor in rows.values():
        tensor.fill_(-1)
    check(kept)
    rows.clear()
    del tensor
    check(pair.rows())  # Most likely in the memory that was returned.
    del kept


def test_each_tensor_has_a_storage_of_its_own_size(pair: Pair) -> None:
    for tensor in pair.rows().values():
        assert tensor.untyped_storage().nbytes() == ROWS * WIDTH * 4


def test_a_tensor_that_begins_within_a_page_is_lent(pair: Pair) -> None:
    """As the rows of one tap do in a block of several, as a tensor of their own."""
    before = pair.lent()
    pair.ask(f"apart {ROWS}")
    message = pair.came.get(timeout=WAIT)
    assert isinstance(message, ResultMessage) and message.result().error is None
    rows = message.result().payload
    for layer in range(2):
        wanted = (torch.arange(ROWS) + 1000 * layer).float()[:, None]
        found = rows[layer, "post_block"]
        assert torch.equal(found, wanted.expand(ROWS, WIDTH + 1))
    after = pair.lent()
    assert after["copied_bytes"] == before["copied_bytes"]
    assert after["leases"] == 2
    del rows, found, message
    pair.wait_until_free()


def test_small_tensors_are_sent(pair: Pair) -> None:
    before = pair.lent()
    check(pair.rows(1), 1)
    after = pair.lent()
    assert after["lent_bytes"] == before["lent_bytes"]
    assert after["copied_bytes"] > before["copied_bytes"]


def test_nothing_leaks_over_many_requests(pair: Pair) -> None:
    for _ in range(20):
        pair.rows()
    pair.wait_until_free()
    files = len(os.listdir("/proc/self/fd"))
    maps = Path("/proc/self/maps").read_text().count("vllm-capture")
    for _ in range(300):
        pair.rows()
    pair.wait_until_free()
    assert len(os.listdir("/proc/self/fd")) <= files
    assert Path("/proc/self/maps").read_text().count("vllm-capture") <= maps


def test_many_blocks_can_be_held_at_once(pair: Pair) -> None:
    held = [pair.rows() for _ in range(200)]
    assert pair.lent()["leases"] == 200
    for rows in held:
        check(rows)
    del rows
    held.clear()
    pair.wait_until_free()


def test_rows_that_cannot_be_mapped_are_read(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        def mmap(self, *arguments: Any) -> Any:
            return borrower.FAILED

    monkeypatch.setattr(borrower, "_libc", Full)
    check(pair.rows())
    pair.wait_until_free()


@pytest.mark.last
def test_rows_outlive_a_worker_that_is_killed(pair: Pair) -> None:
    rows = pair.rows()
    pair.process.kill()
    pair.process.wait()
    sleep(0.5)
    check(rows)
    pair.inbox.close()
    check(rows)
    del rows
    gc.collect()


def test_rows_of_a_worker_that_has_ended_delay_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logged: list[str] = []
    monkeypatch.setattr(zmq_channel.logger, "error", lambda *text: logged.append(text))
    came: queue.Queue[Message] = queue.Queue()
    resume = Event()

    def handle(message: Message) -> None:
        came.put(message)
        resume.wait(WAIT)

    inbox = Inbox(handle)
    killed, other = Worker(inbox.address), Worker(inbox.address)
    for _ in range(4):
        killed.ask(ROWS)
    came.get(timeout=WAIT)  # The thread now waits, and the others in its queue.
    sleep(1)
    killed.close()
    other.ask(ROWS)
    other.lent()  # It has sent its rows.
    sleep(1)
    begin = monotonic()
    resume.set()
    message = came.get(timeout=WAIT)
    assert isinstance(message, ResultMessage)
    check(message.result().payload)
    assert monotonic() - begin < borrower.ANNOUNCE_SECONDS / 2
    sleep(0.5)
    assert len(logged) == 1 and "has ended" in str(logged)
    other.close()
    inbox.close()


def test_what_a_killed_front_end_held_comes_back(tmp_path: Path) -> None:
    script = tmp_path / "front_end.py"
    script.write_text(
        "import sys, time\n"
        "from vllm.v1.capture.transport.zmq_channel import Inbox\n"
        "held = []\n"
        "def keep(message):\n"
        "    held.append(message.result().payload)\n"
        "    print('came', flush=True)\n"
        "inbox = Inbox(keep)\n"
        "print(inbox.address, flush=True)\n"
        "time.sleep(600)\n"
    )
    front = subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, text=True
    )
    assert front.stdout is not None
    worker = Worker(front.stdout.readline().strip())
    try:
        worker.ask(ROWS)
        assert front.stdout.readline().strip() == "came"
        assert worker.lent()["leases"] == 1
        front.kill()
        front.wait()
        worker.wait_until_free()
    finally:
        with front:
            front.kill()
        worker.close()


def test_nobody_listening_means_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lender, "socket_name", lambda address: "\0nobody-listens")
    found = lender.Lender("ipc:///tmp/nowhere")
    assert found(torch.zeros(100, WIDTH)) is None
    assert found.sent_bytes == 100 * WIDTH * 4


def test_why_is_logged_with_the_first_rows_and_not_for_counters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At its end, a worker may send its last counters to a front end that is gone."""
    said: list[str] = []
    monkeypatch.setattr(lender.logger, "warning", lambda text, *_: said.append(text))
    alone = lender.Lender("ipc:///nobody")
    alone.new_message()
    alone.collect()
    assert alone(torch.zeros(8)) is None and not said
    for _ in range(2):
        assert alone(torch.zeros(lender.LEAST_LENT)) is None
    assert len(said) == 1 and "copied to the front end" in said[0]
    assert alone.sent_bytes == 32 + 2 * 4 * lender.LEAST_LENT


def test_nothing_is_left_in_shared_memory_folders() -> None:
    assert not [name for name in os.listdir("/dev/shm") if "vllm-capture" in name]

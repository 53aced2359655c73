# SPDX-License-Identifier: Apache-2.0
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.capture.transport import handouts
from vllm.v1.capture.transport.handouts import (
    Handout,
    Handouts,
    aligned_bytes,
    shared_out,
)
from vllm.v1.capture.transport.parts import Part

MOST = 1 << 20


@pytest.fixture
def made() -> Iterator[Handouts]:
    opened = Handouts(MOST)
    yield opened
    for token in list(opened._open):
        opened.free(token)


def part(number: int, rows: int = 3) -> Part:
    tensor = torch.randn(rows, 7).bfloat16()
    facts = list(range(rows)), [None] * rows, "shm"
    return Part(f"inline/{number}_x", number, "x", tensor, *facts)


def entry(handout: Handout, of: Part) -> Any:
    told = handout.refer(of)
    assert told is not None
    return told["shm"]


@pytest.mark.parametrize("threads", [1, 2])
def test_another_process_maps_what_was_handed_out(
    made: Handouts, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handouts, "threads_for", lambda size: threads)
    parts = [part(0), part(1, 5)]
    handout = made.make(parts)
    assert handout is not None and len(handout.files) == threads
    assert handout.refer(part(2)) is None
    for one in parts:
        where = entry(handout, one)
        read = (
            "import mmap, sys\n"
            f"with open({where['path']!r}, 'rb') as file:\n"
            "    data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)\n"
            f"sys.stdout.buffer.write(data[{where['offset']}:][:{where['nbytes']}])"
        )
        command = [sys.executable, "-c", read]
        assert subprocess.check_output(command) == bytes(one.data)


@given(st.lists(st.integers(0, 40), max_size=12), st.integers(1, 5))
def test_each_thread_has_about_as_much_to_write(sizes: list[int], count: int) -> None:
    parts = [part(number, rows) for number, rows in enumerate(sizes)]
    groups = shared_out(parts, count)
    assert [one for group in groups for one in group] == parts
    assert 1 <= len(groups) <= count
    most = max(map(aligned_bytes, parts), default=0)
    fair = sum(map(aligned_bytes, parts)) / count
    assert all(sum(map(aligned_bytes, group)) <= fair + most for group in groups)


def test_nobody_can_change_what_was_handed_out(made: Handouts) -> None:
    handout = made.make([part(0)])
    assert handout is not None
    path = entry(handout, part(0))["path"]
    with open(path, "r+b", buffering=0) as file:
        with pytest.raises(OSError, match="not permitted"):
            file.write(b"x")
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(file.fileno(), 0)
        with pytest.raises(OSError, match="not permitted"):
            mmap.mmap(file.fileno(), 0)


def test_what_is_mapped_stays_whole_after_it_was_freed(made: Handouts) -> None:
    one = part(0)
    handout = made.make([one])
    assert handout is not None
    path = entry(handout, one)["path"]
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    assert made.free(handout.token) and not made.free(handout.token)
    assert not Path(path).exists() or os.readlink(path) != "/memfd:vllm-answer"
    assert made.held_bytes == 0
    assert mapped[: one.rows.nbytes] == bytes(one.data)


def test_no_more_is_held_than_is_allowed(made: Handouts) -> None:
    large = part(0, MOST // 28)
    first = made.make([large])
    assert first is not None
    assert made.make([large]) is not None
    assert made.make([large]) is None
    made.free(first.token)
    assert made.make([large]) is not None


def test_a_handout_that_is_not_freed_is_closed_in_time(
    made: Handouts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handouts, "KEPT_SECONDS", -1.0)
    assert made.make([part(0)]) is not None
    made.expire()
    assert made.held_bytes == 0


@pytest.mark.parametrize("name", ["ftruncate", "pwritev"])
@pytest.mark.parametrize("threads", [1, 2])
def test_no_memory_means_that_the_answer_is_sent_as_usual(
    made: Handouts, threads: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handouts, "threads_for", lambda size: threads)

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    files = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(handouts.os, name, full)
    assert made.make([part(0), part(1)]) is None
    assert made.held_bytes == 0 and len(os.listdir("/proc/self/fd")) == files


def test_a_failure_waits_for_the_other_tasks() -> None:
    """They may use what the caller frees then."""
    ended = []

    def fail() -> None:
        raise OSError("no memory")

    def slow() -> None:
        time.sleep(0.1)
        ended.append(True)

    for tasks in ([fail, slow, slow], [slow, fail, slow]):
        ended.clear()
        with pytest.raises(OSError, match="no memory"):
            handouts.in_parallel(tasks)
        assert len(ended) == 2

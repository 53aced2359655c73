# SPDX-License-Identifier: Apache-2.0
"""Memory of rows is used again, but never while anything refers to it."""

import gc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from clearbox_client import memory
from clearbox_client.memory import SMALLEST, Memory

SIZE = 5 << 20


def address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def test_memory_is_used_again_once_its_last_view_is_gone() -> None:
    pool = Memory()
    view = pool.take(SIZE)
    view[:] = b"x" * SIZE
    place = address(view)
    array = np.frombuffer(view[100:200], np.uint8)[10:20]
    del view
    gc.collect()
    other = pool.take(SIZE)
    assert address(other) != place
    other[:] = b"y" * SIZE
    assert bytes(array) == b"x" * 10
    del array
    gc.collect()
    again = pool.take(SIZE - 1000)
    assert address(again) == place and len(again) == SIZE - 1000
    again[:] = b"z" * len(again)
    assert bytes(other[:10]) == b"y" * 10


def test_little_is_taken_for_little() -> None:
    pool = Memory()
    del [pool.take(SIZE)][:]
    assert len(pool.take(SIZE // 4)) == SIZE // 4
    assert pool._kept  # It is too large for that.
    assert len(pool.take(SMALLEST - 1)) == SMALLEST - 1
    assert len(pool.take(0)) == 0


def test_no_more_is_kept_than_is_allowed() -> None:
    pool = Memory(most_kept=4 * SIZE)
    held = [pool.take(SIZE) for _ in range(8)]
    held.clear()
    pool.take(20 * SIZE)
    assert sum(map(len, pool._kept)) <= 4 * SIZE


def test_a_system_that_takes_nothing_back_has_none_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "KEEPS", False)
    pool = Memory()
    for _ in range(2):
        assert len(pool.take(SIZE)) == SIZE
    assert not pool._kept and not pool._returned


def test_threads_never_share_memory() -> None:
    pool = Memory()

    def use(number: int) -> bool:
        same = True
        for _ in range(30):
            view = np.frombuffer(pool.take(SMALLEST + number), np.uint8)
            view[:] = number
            same &= bool((view == number).all())
        return same

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(use, range(16)))
    assert len(pool._kept) + len(pool._returned) <= 2 * 8  # A new one and the last.

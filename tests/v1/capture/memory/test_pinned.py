# SPDX-License-Identifier: Apache-2.0
import gc
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.capture.memory.buffer_pool import Bytes, Extents
from vllm.v1.capture.memory.pinned import Pages
from vllm.v1.capture.memory.shared import ALIGNMENT

SIZE = 32
ROW = ALIGNMENT // 4
"""Number of float32 values in a row of the smallest allocation."""


@given(st.lists(st.integers(1, SIZE) | st.tuples(st.integers(0, 99)), max_size=60))
def test_extents_never_overlap_and_what_is_given_back_is_whole_again(
    actions: list[int | tuple[int]],
) -> None:
    extents, taken = Extents(SIZE), dict[int, int]()
    for action in actions:
        if isinstance(action, int):
            start = extents.take(action)
            covered = {i for a, n in taken.items() for i in range(a, a + n)}
            free = [i not in covered for i in range(SIZE)]
            fits = any(all(free[i : i + action]) for i in range(SIZE - action + 1))
            assert (start is not None) == fits
            if start is not None:
                assert all(free[start : start + action])
                taken[start] = action
        elif taken:
            start = sorted(taken)[action[0] % len(taken)]
            extents.give_back(start, taken.pop(start))
        assert extents.is_free == (not taken)
    for start, size in taken.items():
        extents.give_back(start, size)
    assert extents.is_free


def wait(made: Pages) -> None:
    """Wait until no slab is being pinned."""
    assert made._growing is not None
    made._growing.join()


def pages(slab_rows: int, slabs: int) -> tuple[Pages, list[Bytes]]:
    """Pages that only record what they would pin."""
    pinned: list[Bytes] = []
    made = Pages(slab_rows * ALIGNMENT, slabs * slab_rows * ALIGNMENT, pinned.append)
    wait(made)
    return made, pinned


def test_a_page_is_taken_until_its_last_view_is_gone() -> None:
    made, pinned = pages(slab_rows=3, slabs=1)
    page = made.take((2, ROW), torch.float32)
    assert page is not None and page.shape == (2, ROW)
    slab = pinned[0].ctypes.data
    assert slab <= page.data_ptr() < slab + 3 * ALIGNMENT
    assert made.take((2, ROW), torch.float32) is None
    row = page[1]
    del page
    gc.collect()
    assert made.take((2, ROW), torch.float32) is None
    del row
    gc.collect()
    assert made.take((3, ROW), torch.float32) is not None


def test_a_closed_engine_pins_no_more() -> None:
    pinned: list[Bytes] = []
    closed = threading.Event()

    def pin(memory: Bytes) -> None:
        pinned.append(memory)
        closed.wait(10)

    made = Pages(ALIGNMENT, 8 * ALIGNMENT, pin, 8 * ALIGNMENT)
    made.close()
    closed.set()
    wait(made)
    assert len(pinned) <= 1


def test_memory_for_the_next_step_is_pinned_ahead_up_to_a_bound() -> None:
    made, pinned = pages(slab_rows=2, slabs=2)
    assert len(pinned) == 1
    held = [made.take((1, ROW), torch.float32)]
    wait(made)
    assert len(pinned) == 2
    held += [made.take((2, ROW), torch.float32), made.take((1, ROW), torch.float32)]
    wait(made)
    assert all(page is not None for page in held)
    assert made.take((1, ROW), torch.float32) is None and len(pinned) == 2
    for number, page in enumerate(held):
        assert page is not None
        page.fill_(number)
    for number, page in enumerate(held):
        assert page is not None and bool((page == number).all())


def test_a_page_larger_than_a_slab_is_not_had() -> None:
    made, _ = pages(slab_rows=2, slabs=4)
    assert made.take((3, ROW), torch.float32) is None


def test_no_call_waits_while_memory_is_being_pinned() -> None:
    go = threading.Event()
    made = Pages(ALIGNMENT, ALIGNMENT, lambda memory: go.wait(10) and None)
    assert made.take((1, ROW), torch.float32) is None
    go.set()
    wait(made)
    assert made.take((1, ROW), torch.float32) is not None


def test_where_no_more_can_be_pinned_it_is_not_tried_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, pinned = pages(slab_rows=1, slabs=9)
    tries: list[Bytes] = []

    def fail(memory: Bytes) -> None:
        tries.append(memory)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(made, "_pin", fail)
    held = made.take((1, ROW), torch.float32)
    wait(made)
    for _ in range(3):
        assert made.take((1, ROW), torch.float32) is None
        wait(made)
    assert len(tries) == 1 and len(pinned) == 1
    del held
    gc.collect()
    assert made.take((1, ROW), torch.float32) is not None

# SPDX-License-Identifier: Apache-2.0
import ctypes
import threading
from collections import deque
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.capture.staging.ring import (
    EVERY_TAP,
    Copy,
    RowRing,
    Segment,
    Staging,
    batches,
    in_order,
)

RING = 8
WIDTH = 4


@given(st.lists(st.integers(1, RING) | st.none(), max_size=40))
def test_live_segments_never_overlap(actions: list[int | None]) -> None:
    ring, live = RowRing(RING), deque[Segment]()
    for rows in actions:
        if rows is None:
            if live:
                ring.release(live.popleft())
            continue
        segment = ring.reserve(rows, timeout=0)
        if segment is not None:
            assert segment.num_rows == rows
            live.append(segment)
        taken = [row for s in live for row in range(s.start, s.start + s.num_rows)]
        assert len(taken) == len(set(taken))
        assert all(0 <= row < RING for row in taken)


@given(st.lists(st.integers(1, RING // 2), min_size=1, max_size=40))
def test_steps_of_half_the_ring_always_have_room_for_one_more(
    sizes: list[int],
) -> None:
    ring, live = RowRing(RING), deque[Segment]()
    for rows in sizes:
        while (segment := ring.reserve(rows, timeout=0)) is None:
            assert live, "an empty ring has no room"
            ring.release(live.popleft())
        live.append(segment)


def test_a_full_ring_waits_until_the_oldest_segment_is_given_back() -> None:
    ring = RowRing(RING)
    first, second = ring.reserve(5), ring.reserve(3)
    assert first is not None and second is not None
    assert ring.reserve(4, timeout=0.01) is None
    got: list[Segment | None] = []
    waiting = threading.Thread(target=lambda: got.append(ring.reserve(4, timeout=10)))
    waiting.start()
    ring.release(first)
    waiting.join(10)
    assert got == [Segment(0, 4)]


def test_segments_are_given_back_in_order() -> None:
    ring = RowRing(RING)
    ring.reserve(2)
    second = ring.reserve(2)
    assert second is not None
    with pytest.raises(AssertionError, match="the oldest is"):
        ring.release(second)


def test_a_step_larger_than_the_ring_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="staging memory that has 8"):
        RowRing(RING).reserve(9)


def test_on_a_cpu_the_host_rows_are_the_device_rows() -> None:
    staging = Staging(4, 3, torch.bfloat16, torch.device("cpu"))
    assert staging.host_rows.data_ptr() == staging.rows.data_ptr()
    assert staging.rows.dtype == torch.bfloat16
    segment = staging.ring.reserve(4)
    assert segment is not None
    assert staging.to_host([segment]) is None


@given(
    st.lists(st.lists(st.integers(EVERY_TAP, 9), max_size=9), max_size=9),
    st.lists(st.integers(0, 9), unique=True, max_size=10),
    st.integers(1, 4),
)
def test_rows_are_copied_once_after_the_part_that_computes_them(
    taps: list[list[int]], computed: list[int], each: int
) -> None:
    memory = torch.empty(0)
    events: list[Any] = [object() for _ in range(0, len(computed), each)]
    groups = [computed[at : at + each] for at in range(0, len(computed), each)]
    copies = [Copy(own, memory, memory) for own in taps]
    done: list[tuple[int, int]] = []
    order = []
    for event, own in in_order(copies, list(zip(groups, events, strict=True))):
        group = groups[events.index(event)] if event is not None else None
        for copy, indices in own:
            for index in indices:
                tap = copy.taps[index]
                assert tap in group if group is not None else tap not in computed
            number = next(n for n, one in enumerate(copies) if one is copy)
            done.extend((number, index) for index in indices)
        order.append(len(events) if event is None else events.index(event))
    every = [(n, index) for n, own in enumerate(taps) for index in range(len(own))]
    assert sorted(done) == every
    assert order == sorted(order)


@pytest.mark.parametrize("encoded", [False, True])
@given(data=st.data())
def test_the_pieces_of_copies_are_all_of_their_rows(
    encoded: bool, data: st.DataObject
) -> None:
    """The copies that a GPU's driver would do, done by the C library."""
    encoder = Mock(width=2, dtype=torch.float32) if encoded else None
    if encoder is not None:
        encoder.encode = lambda rows: rows.float()[:, :2] * 2
    cpu = torch.device("cpu")
    staging = Staging(1, 3, torch.bfloat16, cpu, encoder=encoder)
    staging._piece_rows = data.draw(st.integers(1, 4))
    copies, expected = [], []
    for _ in range(data.draw(st.integers(0, 3))):
        taps, rows, place = (data.draw(st.integers(1, 5)) for _ in range(3))
        device = torch.randn(taps, rows + place + 1, 3).bfloat16()
        device = device[:, place : place + rows]
        width = staging.host_rows.shape[1]
        host = torch.zeros(taps, rows + place, width, dtype=staging.host_rows.dtype)
        whole = host.clone()
        chosen = data.draw(st.lists(st.integers(0, taps - 1), unique=True))
        for tap in chosen:
            whole[tap, place:] = staging._encoded(device[tap])
        copies.append((Copy(range(taps), host[:, place:], device), chosen))
        expected.append((host, whole))
    most = data.draw(st.integers(1, 64))
    with patch("vllm.v1.capture.staging.ring.PIECE_BYTES", most):
        for some in batches(staging._pieces(copies)):
            assert sum(piece[2] for piece in some[:-1]) < most
            for source, target, num_bytes, _ in some:
                ctypes.memmove(target, source, num_bytes)
    for host, whole in expected:
        assert host.equal(whole)

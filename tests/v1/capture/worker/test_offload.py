# SPDX-License-Identifier: Apache-2.0
"""Steps are sent together unless a consumer waits or memory runs out."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm.v1.capture.dispatch.step_buffer import StagedStep
from vllm.v1.capture.staging.ring import Segment, Staging
from vllm.v1.capture.worker.offload import (
    COMMON_END_BYTES,
    STEPS_AT_ONCE,
    Offload,
    row_encoder,
)
from vllm.v1.residual.capture_plan import LIVE
from vllm.v1.residual.row_blocks import BlockRow
from vllm.v1.residual.step_view import TrueStarts

RING = 80 * STEPS_AT_ONCE


class Heard:
    """A stand-in for the dispatcher, which frees the memory of processed steps."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self.segments: list[Segment] = []
        self.calls: list[Any] = []

    def steps(self, staged: list[StagedStep], copied: None) -> None:
        self.segments += [step.segment for step in staged]
        self.calls.append(len(staged))

    def hand_on(self, req_ids: tuple[str, ...] | None = None) -> None:
        self.calls.append("all" if req_ids is None else req_ids)
        if req_ids is None:
            self._staging.ring.release(*self.segments)
            self.segments = []


class Bench:
    """Steps of one size, with an irrelevant layout."""

    def __init__(self, ring: int = RING) -> None:
        self.staging = Staging(ring, 1, torch.float32, torch.device("cpu"))
        self.heard: Any = Heard(self.staging)
        self.sending = Offload(self.staging, self.heard)
        self._number = 0
        self.layout = 0
        """The number of the layout; a change of the batch has another."""
        self.decoding: dict[str, BlockRow] = {}

    def step(
        self, rows: int = 1, at_once: set[str] | None = None, true: Any = None
    ) -> None:
        segment = self.sending.reserve(rows)
        columns = range(rows // max(len(self.decoding), 1))
        block = SimpleNamespace(columns=columns, decoding=self.decoding)
        layout = SimpleNamespace(blocks=(block,), num_rows=rows, number=self.layout)
        placed: Any = SimpleNamespace(layout=layout, shift=self._number)
        step = StagedStep(self._number, placed, segment, true)
        self._number += 1
        self.sending.add(step, at_once or set())


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_small_steps_leave_together(bench: Bench) -> None:
    for _ in range(STEPS_AT_ONCE - 1):
        bench.step()
    assert bench.heard.calls == []
    bench.step()
    assert bench.heard.calls == [STEPS_AT_ONCE, "all"]


def test_steps_that_were_sent_for_an_end_count_as_well(bench: Bench) -> None:
    for number in range(STEPS_AT_ONCE):
        bench.step()
        if number == 9:
            bench.sending.send()
    assert bench.heard.calls == [10, STEPS_AT_ONCE - 10, "all"]


def test_an_eighth_of_the_memory_is_enough(bench: Bench) -> None:
    bench.step(RING // 8 - 1)
    assert bench.heard.calls == []
    bench.step(1)
    assert bench.heard.calls == [2, "all"]


def test_a_reader_of_each_step_gets_only_its_own_rows(bench: Bench) -> None:
    bench.step()
    bench.step(at_once={"live"})
    assert bench.heard.calls == [2, ("live",)]


def test_steps_with_assumed_positions_do_not_wait(bench: Bench) -> None:
    starts: Any = TrueStarts
    bench.step(true=starts)
    assert bench.heard.calls == [1, "all"]


def test_nothing_waits_while_nothing_is_captured(bench: Bench) -> None:
    bench.sending.hand_on()
    assert bench.heard.calls == []
    bench.step()
    bench.sending.send()
    bench.sending.hand_on()
    bench.sending.hand_on()
    assert bench.heard.calls == [1, "all"]


MANY_ROWS = COMMON_END_BYTES // 4
"""Rows of 4 bytes, just enough to leave early."""


class CommonEndBench(Bench):
    """32 requests whose rows of a step are just enough, and their last positions."""

    def __init__(self) -> None:
        super().__init__(ring=200 * MANY_ROWS)
        for number in range(32):
            self.decoding[str(number)] = BlockRow(0, 100 + number, number)

    def expect(self, last: int) -> None:
        """All of them end with the step of this number."""
        for req_id, row in self.decoding.items():
            self.sending.expect(req_id, row.origin + last)


@pytest.mark.parametrize(("last", "calls"), [(20, [11, 5, 3, 1, 1]), (2, [2, 1])])
def test_rows_of_many_requests_that_end_together_leave_before(
    last: int, calls: list[int]
) -> None:
    """As many steps as remain wait at most, and none after the last one."""
    bench = CommonEndBench()
    bench.expect(last)
    for _ in range(last + 1):
        bench.step(MANY_ROWS)
    assert bench.heard.calls == [call for count in calls for call in (count, "all")]


def test_few_rows_wait_although_their_end_is_known() -> None:
    bench = CommonEndBench()
    bench.expect(3)
    for _ in range(4):
        bench.step(MANY_ROWS - 32)
    assert bench.heard.calls == []


def test_ends_that_came_early_or_not_at_all_change_nothing() -> None:
    bench = CommonEndBench()
    bench.expect(3)
    for req_id in bench.decoding:
        bench.sending.forget(req_id)
    for _ in range(5):
        bench.step(MANY_ROWS)
    assert bench.heard.calls == []
    bench.expect(3)
    bench.layout += 1
    bench.step(MANY_ROWS)
    assert bench.heard.calls == []


def test_where_there_is_no_room_all_that_waits_is_handed_on(bench: Bench) -> None:
    bench.step(RING // 8 - 1)
    bench.sending.send()
    segment = bench.sending.reserve(RING)
    assert segment == Segment(0, RING)
    assert bench.heard.calls == [1, "all"]


def test_a_page_goes_by_itself_behind_what_came_before(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.step()
    monkeypatch.setattr(bench.staging, "to_pages", lambda *step: ({}, None))
    bench.step(4)
    assert bench.heard.calls == [1, 1, "all"]


def test_rows_are_encoded_for_the_only_consumer_of_a_gpu() -> None:
    one: Any = SimpleNamespace(can=SimpleNamespace(row_encoder=lambda *what: what))
    plain: Any = SimpleNamespace(can=SimpleNamespace(row_encoder=None))
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    facts = 8, torch.bfloat16
    live = {LIVE: plain}  # takes rows only of consumers that stream them
    assert row_encoder(live | {"a": one}, *facts, gpu) == (*facts, gpu)
    assert row_encoder(live | {"a": one}, *facts, cpu) is None
    assert row_encoder(live | {"a": one, "b": plain}, *facts, gpu) is None
    assert row_encoder(live | {"b": plain}, *facts, gpu) is None
    assert row_encoder({}, *facts, gpu) is None

# SPDX-License-Identifier: Apache-2.0
"""Steps are sent together unless a consumer waits or memory runs out."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm.v1.capture.dispatch.step_buffer import StagedStep
from vllm.v1.capture.plan import LIVE
from vllm.v1.capture.staging.ring import Segment, Staging
from vllm.v1.capture.worker.offload import STEPS_AT_ONCE, Offload, row_encoder
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

    def __init__(self) -> None:
        self.staging = Staging(RING, 1, torch.float32, torch.device("cpu"))
        self.heard: Any = Heard(self.staging)
        self.sending = Offload(self.staging, self.heard)
        self._number = 0

    def step(
        self, rows: int = 1, at_once: set[str] | None = None, true: Any = None
    ) -> None:
        segment = self.sending.reserve(rows)
        placed: Any = SimpleNamespace(layout=SimpleNamespace(blocks=()))
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

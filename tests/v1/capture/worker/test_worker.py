# SPDX-License-Identifier: Apache-2.0
"""A worker's capture: the steps are drawn."""

import queue
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from tests.v1.capture._simulation import WIDTH, Life, Step
from tests.v1.capture._sinks import WAIT
from tests.v1.capture._strategies import plan_for
from tests.v1.capture._worker_bench import TAPS, Bench
from vllm.model_executor.layers.residual.capture_op import ALIGNMENT
from vllm.v1.capture.dispatch.request import CapturedRequest
from vllm.v1.capture.transport.zmq_channel import EndMessage, ResultMessage
from vllm.v1.capture.worker.worker import SWITCH_SECONDS
from vllm.v1.residual.readout_plan import KeepWhen, ReadoutPlan, StopWhen
from vllm.v1.residual.step_view import StepView

pytestmark = pytest.mark.usefixtures("no_engine")


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    opened = Bench()
    yield opened
    opened.close()


def test_what_taps_read_is_aligned_so_that_compiled_code_copies_nothing(
    bench: Bench,
) -> None:
    for tap in TAPS:
        assert not any(t.data_ptr() % ALIGNMENT for t in bench.worker.tensors(tap))


def test_other_threads_do_not_keep_the_interpreter_from_the_engines() -> None:
    before = sys.getswitchinterval()
    try:
        for given, expected in ((0.005, SWITCH_SECONDS), (0.0001, 0.0001)):
            sys.setswitchinterval(given)
            Bench().close()
            assert sys.getswitchinterval() == pytest.approx(expected, abs=2e-6)
    finally:
        sys.setswitchinterval(before)


def test_a_step_without_captured_rows_launches_nothing(bench: Bench) -> None:
    view = StepView(["x"], np.array([0]), np.array([3]), 3)
    assert bench.worker.plan_step(view) == frozenset()
    bench.worker.begin_step(3)
    bench.worker.end_step()
    assert (bench.worker._slots.of_taps == -1).all()


def test_slots_that_were_cleared_are_written_again(bench: Bench) -> None:
    name, steps = bench.new_name(), 3
    bench.open(name, plan_for({"a": {TAPS[0]: ((0, steps),)}}, 1))
    for position in range(steps):
        bench.step([(name, position, (float(position),))])
        bench.worker._slots.clear()
        assert (bench.worker._slots.of_taps == -1).all()
    bench.end(name, Life(1, (), steps, steps))
    rows = bench.collect(1)[name, "a", TAPS[0]]
    assert [value for value, _ in rows] == [0.0, 1.0, 2.0]


def test_other_tensor_parallel_ranks_decide_alike_but_take_no_rows() -> None:
    bench = Bench(tensor_rank=1)
    plan = plan_for({"a": {(0, "pre_attn"): ((0, 3),)}}, 3)
    bench.worker.add_request("r", plan, [1, 2, 3], None)
    view = StepView(["r"], np.array([0]), np.array([3]), 3)
    assert bench.worker.plan_step(view)
    bench.worker.begin_step(3)
    assert (bench.worker._slots.of_taps == -1).all()
    bench.worker.end_step()
    bench.close()


def test_a_request_that_no_step_has_seen_is_answered_at_once(bench: Bench) -> None:
    name = bench.new_name()
    bench.end(name, Life(3, (), 0, 0))
    for instance in "abc":
        message = bench.messages.get(timeout=WAIT)
        assert isinstance(message, ResultMessage)
        assert (message.request_id, message.instance) == (name, instance)
        assert message.status == "error"


def test_a_front_end_hears_of_an_end_once(bench: Bench) -> None:
    name = bench.new_name()
    life = Life(3, (Step(0, (0.0,)),), 0, 1)  # Aborted while the prompt is computed.
    bench.open(name, plan_for({"a": {(0, "pre_attn"): ((0, 3),)}}, 3))
    bench.step([(name, 0, (0.0,))])
    bench.end(name, life)
    assert bench.collect(1) == {(name, "a", (0, "pre_attn")): [(0.0, 0.0)]}
    with pytest.raises(queue.Empty):
        bench.messages.get(timeout=0.2)


def test_a_capture_that_is_pending_when_the_engine_stops_is_reported() -> None:
    bench = Bench()
    name = bench.new_name()
    bench.open(name, plan_for({"a": {(0, "pre_attn"): ((0, 10),)}}, 4))
    bench.step([(name, 0, (0.0, 1.0, 2.0, 3.0))])
    bench.worker.close()
    sidecars = []
    while not sidecars:
        message = bench.messages.get(timeout=WAIT)
        if isinstance(message, EndMessage):
            sidecars = [end.sidecar for end in message.ends]
    assert [sidecar["capture_error"] for sidecar in sidecars] == [
        "the engine stopped before the request had finished"
    ]
    for inbox in (bench.inbox, *bench.inboxes):
        inbox.close()


def test_a_page_is_handed_on_as_it_is() -> None:
    bench = Bench(page_every=1)
    source: Any = bench.worker._staging.requests
    lane: Any = bench.worker._lanes["a"]
    page, chunks = torch.zeros(1, 4, WIDTH), []
    source._pages.take, lane.submit = lambda *_: page, chunks.extend
    name = bench.new_name()
    bench.open(name, plan_for({"a": {TAPS[0]: ((0, 4),)}}, 4))
    bench.step([(name, 0, (0.0, 1.0, 2.0, 3.0))])
    bench.end(name, Life(4, (), 1, 4))
    bench.collect(1)
    assert [chunk.tensor.data_ptr() for chunk in chunks] == [page.data_ptr()]
    assert page[0, :, 0].tolist() == [0, 1, 2, 3]
    bench.close()


def test_rows_that_nobody_keeps_are_not_copied(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered, gather = [], CapturedRequest.gather

    def note(self: CapturedRequest, *given: Any) -> Any:
        gathered.append(self.req_id)
        return gather(self, *given)

    monkeypatch.setattr(CapturedRequest, "gather", note)
    plan = plan_for({"a": {TAPS[0]: ((0, 9),)}}, 1)
    keep = KeepWhen("a", StopWhen("r", 0.0), "request", 0, 0)
    plan = structs.replace(plan, readouts=ReadoutPlan((), keep_when=(keep,)))
    names = bench.new_name(), bench.new_name()
    for name in names:
        bench.open(name, plan)
    for position in range(5):
        bench.step([(name, position, (float(position),)) for name in names])
    for name, spans in zip(names, ((), ((0, 9),)), strict=True):
        bench.end(name, Life(1, (), 6, 5), {"a": spans})
    assert [*bench.collect(2)] == [(names[1], "a", TAPS[0])]
    assert gathered == [names[1]]
    assert not bench.worker._staging.ring._taken, "all memory of the steps is free"


def fail(*_: Any) -> None:
    raise RuntimeError("the device is gone")


@pytest.mark.parametrize("fault", ["copy", "rows"])
def test_steps_whose_rows_are_lost_are_lost_alone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    staging, dispatcher = bench.worker._staging, bench.worker._dispatcher
    send = dispatcher.send if fault == "copy" else dispatcher.hand_on
    name = bench.new_name()
    bench.open(name, plan_for({"a": {TAPS[0]: ((0, 9),)}}, 1))
    for position in range(6):
        with monkeypatch.context() as patch:
            if position in (2, 3) and fault == "copy":
                failed = SimpleNamespace(synchronize=fail)
                patch.setattr(staging, "to_host", lambda _, one=failed: one)
            elif position in (2, 3):
                patch.setattr(CapturedRequest, "gather", fail)
            bench.step([(name, position, (float(position),))])
            send()
            done = threading.Event()
            dispatcher._thread.put([], done.set)
            assert done.wait(WAIT)
        assert fault == "copy" or not staging.ring._taken
    bench.end(name, Life(1, (), 7, 6))
    assert [row for row, _ in bench.collect(1)[name, "a", TAPS[0]]] == [0, 1, 4, 5]
    assert not staging.ring._taken

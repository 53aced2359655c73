# SPDX-License-Identifier: Apache-2.0
"""A worker's capture: the steps are drawn."""

import queue
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from tests.v1.capture._simulation import Life, Step
from tests.v1.capture._sinks import WAIT
from tests.v1.capture._strategies import plan_for
from tests.v1.capture._worker_bench import TAPS, Bench
from vllm.model_executor.layers.residual.capture_op import ALIGNMENT
from vllm.v1.capture.transport.zmq_channel import EndMessage, ResultMessage
from vllm.v1.capture.worker.worker import SWITCH_SECONDS
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
        bench.worker.clear_slots()
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

# SPDX-License-Identifier: Apache-2.0
from itertools import product
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.v1.steering.worker import test_phase
from vllm.model_executor.layers.residual.capture_op import ALIGNMENT, Launch
from vllm.model_executor.layers.residual.tap import ResidualTap
from vllm.v1.residual.step_view import StepView
from vllm.v1.steering.plan import SteeringTiers, operation, pack
from vllm.v1.steering.slots import SteeringStep
from vllm.v1.steering.worker.tables import token_rows
from vllm.v1.steering.worker.worker import WorkerSteering

TAP = (0, "post_block")
WIDTH = 4
pytestmark = pytest.mark.usefixtures("no_engine")


def view(*requests: tuple[str, int, int]) -> StepView:
    scheduled = np.array([n for _, _, n in requests])
    return StepView(
        [name for name, _, _ in requests],
        np.array([computed for _, computed, _ in requests]),
        scheduled,
        int(scheduled.sum()),
    )


@given(
    requests=st.lists(
        st.tuples(st.integers(0, 9), st.integers(1, 6), st.integers(1, 9)),
        min_size=1,
        max_size=5,
    )
)
def test_positions_decide_between_prefill_and_decode_rows(requests: list) -> None:
    step = view(*[(str(i), c, n) for i, (c, n, _) in enumerate(requests)])
    rows = [(2 * i, 2 * i + 1) for i in range(len(requests))]
    lengths = [length for _, _, length in requests]
    expected = [
        2 * i + (position >= length)
        for i, (computed, n, length) in enumerate(requests)
        for position in range(computed, computed + n)
    ]
    found = token_rows(rows, lengths, step)
    assert (found.tolist(), found.dtype) == (expected, np.int32)


def worker(stages: int = 1) -> tuple[WorkerSteering, ResidualTap]:
    steering = test_phase.worker([TAP], WIDTH, stages=stages)
    tap = ResidualTap(None, None, None, *steering.tensors(TAP))
    return steering, tap


def tiers(base: float = 0, prefill: float = 0, decode: float = 0) -> SteeringTiers:
    packed = [
        pack({TAP: np.full(WIDTH, value, dtype=np.float32)})
        for value in (base, prefill, decode)
    ]
    return SteeringTiers(*packed)


def added(steering: WorkerSteering, tap: ResidualTap, step: StepView) -> list[float]:
    """The addition of a step to each token; checks that padding gets none."""
    Launch.taps = steering.plan_step(step)
    steering.begin_step()
    stream, residual = tap(torch.zeros(step.num_rows + 3, WIDTH), None)
    assert residual is None
    assert (stream == stream[:, :1]).all()
    assert not stream[step.num_rows :].any()
    return stream[: step.num_rows, 0].tolist()


def start(steering: WorkerSteering, name: str, slot: int, load: Any = None) -> None:
    loads = [] if load is None else [(slot, load)]
    step = SteeringStep(loads, {name: slot})
    steering.update([], [(name, 3)], step)


def test_what_taps_read_is_aligned_so_that_compiled_code_copies_nothing() -> None:
    taps = [(layer, "post_block") for layer in range(5)]
    steering = test_phase.worker(taps, 3, torch.bfloat16)
    for tap in taps:
        tensors = filter(torch.is_tensor, steering.tensors(tap))
        assert not any(t.data_ptr() % ALIGNMENT for t in tensors)


@pytest.mark.parametrize("given_tiers", product((0, 1), repeat=6))
def test_tiers_of_engine_and_request_add_up(given_tiers: tuple[int, ...]) -> None:
    base, prefill, decode, *shared = given_tiers
    steering, tap = worker()
    start(steering, "a", 0, tiers(base, prefill, decode))
    steering.update([], [("plain", 2)], None)
    steering.stage_global(tiers(*shared))
    steering.commit_global(True)
    theirs = [shared[0] + shared[1], shared[0] + shared[2]]
    both = [base + prefill + theirs[0], base + decode + theirs[1]]
    step = view(("a", 2, 2), ("plain", 1, 2))
    assert added(steering, tap, step) == [*both, *theirs]


def test_a_change_that_fails_elsewhere_is_dropped() -> None:
    steering, tap = worker()
    steering.update([], [("plain", 2)], None)
    steering.stage_global(tiers(10))
    steering.commit_global(False)
    assert added(steering, tap, view(("plain", 0, 2))) == [0, 0]


def test_requests_that_ended_leave_no_row_behind() -> None:
    steering, tap = worker()
    start(steering, "a", 1, tiers(1))
    assert added(steering, tap, view(("a", 0, 4))) == [1, 1, 1, 1]
    steering.update(["a"], [("a", 3)], None)
    assert added(steering, tap, view(("a", 0, 2))) == [0, 0]
    assert not steering._slots


def test_rows_that_add_nothing_keep_the_sign_of_zero() -> None:
    steering, tap = worker()
    start(steering, "a", 0, tiers(1))
    steering.update([], [("plain", 2)], None)
    steering.plan_step(view(("a", 0, 1), ("plain", 0, 2)))
    steering.begin_step()
    stream = torch.full((3, WIDTH), -0.0)
    changed, _ = tap(stream, None)
    assert torch.signbit(changed[1:]).all()


def test_batches_that_alternate_keep_their_plans() -> None:
    steering, tap = worker(stages=2)
    three = np.full(WIDTH, 3, dtype=np.float32)
    replace = operation(TAP, "replace", three, 1.0, (None, None), False, None)
    start(steering, "a", 0, tiers(1))
    start(steering, "b", 1, SteeringTiers(base=pack({}, [replace])))
    start(steering, "c", 2, tiers(4))
    steering.update([], [("plain", 3)], None)
    plans = Mock(wraps=steering._rows_of_requests)
    steering._rows_of_requests = plans  # type: ignore[method-assign]
    for position in range(3, 8):
        both = view(("a", position, 1), ("b", position, 1))
        others = view(("plain", position, 1), ("c", 40 + position, 1))
        assert added(steering, tap, both) == [1, 3]
        assert added(steering, tap, others) == [0, 4]
    assert plans.call_count == 2
    steering.stage_global(tiers(10))
    steering.commit_global(True)
    others = view(("plain", 8, 1), ("c", 48, 1))
    assert added(steering, tap, others) == [10, 14]


def test_a_batch_that_is_no_step_runs_no_program() -> None:
    """An idle engine runs a dummy batch while others have steps: it has other rows."""
    steering, tap = worker()
    three = np.full(WIDTH, 3, dtype=np.float32)
    replace = operation(TAP, "replace", three, 1.0, (None, None), False, None)
    start(steering, "a", 0, SteeringTiers(base=pack({}, [replace])))
    Launch.taps = steering.plan_step(view(("a", 0, 2)))
    steering.begin_step()
    assert tap(torch.zeros(2, WIDTH), None)[0].tolist() == [[3.0] * WIDTH] * 2
    steering.end_step()
    Launch.taps = frozenset()  # As `GraphFamilies.end` does.
    assert not tap(torch.zeros(1, WIDTH), None)[0].any()
    Launch.taps = steering.plan_step(view(("a", 2, 1)))
    steering.begin_step()
    assert tap(torch.zeros(1, WIDTH), None)[0].all(), "the next step has it again"

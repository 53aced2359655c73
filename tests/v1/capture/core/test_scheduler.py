# SPDX-License-Identifier: Apache-2.0
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.v1.capture._strategies import plan_for, wanted
from vllm.v1.capture.core.scheduler import (
    CaptureScheduling,
    cacheable_tokens,
    loadable_tokens,
)
from vllm.v1.residual.capture_plan import READOUTS, CaptureEnd, CapturePlan

PROMPT, END = 6, 20


def request(plan: CapturePlan | None, name: str = "r") -> Any:
    params = SimpleNamespace(_capture_plan=plan)
    return SimpleNamespace(request_id=name, sampling_params=params)


def scheduling_of(budget: int, *requests: Any, tokens: int = 1) -> CaptureScheduling:
    scheduling = CaptureScheduling(budget, tokens)
    for one in requests:
        scheduling.add_request(one)
    return scheduling


plans = wanted(PROMPT, END).map(lambda want: plan_for(want, PROMPT))


@given(plans, st.integers(0, END), st.integers(0, 10), st.integers(0, 40))
def test_a_request_gets_the_most_tokens_whose_rows_fit(
    plan: CapturePlan, computed: int, num_tokens: int, budget: int
) -> None:
    fits = [
        n
        for n in range(num_tokens + 1)
        if plan.rows_in(computed, computed + n) <= budget
    ]
    one = request(plan)
    assert scheduling_of(budget, one).limit(one, computed, num_tokens) == max(fits)


@given(st.lists(st.tuples(plans, st.integers(0, END), st.integers(0, 10))))
def test_a_step_never_captures_more_rows_than_its_budget(batch: list) -> None:
    requests = [request(plan, f"r{i}") for i, (plan, _, _) in enumerate(batch)]
    scheduling, rows = scheduling_of(20, *requests), 0
    for one, (plan, computed, num_tokens) in zip(requests, batch):
        granted = scheduling.limit(one, computed, num_tokens)
        scheduling.scheduled(one, computed, granted)
        wanted = [plan.rows_in(computed, computed + n) for n in range(num_tokens + 1)]
        assert granted == max(n for n, more in enumerate(wanted) if rows + more <= 20)
        rows += wanted[granted]
    assert rows <= 20


@given(plans, st.integers(12, 40))
def test_step_by_step_every_token_is_scheduled(plan: CapturePlan, budget: int) -> None:
    one = request(plan)
    scheduling, computed, steps = scheduling_of(budget, one), 0, 0
    while computed < END:
        scheduling.new_step()
        granted = scheduling.limit(one, computed, END - computed)
        assert granted > 0, "a request that admission let in cannot go on"
        scheduling.scheduled(one, computed, granted)
        computed, steps = computed + granted, steps + 1
    total = plan.rows_in(0, END)
    assert steps <= max(1, 2 * -(-total // budget) + 1)


@given(
    st.lists(st.tuples(plans, st.integers(0, END), st.integers(0, 10)), min_size=1),
    st.integers(1, 60),
    st.integers(1, 400),
)
def test_rows_are_counted_as_long_as_a_step_could_have_too_many(
    batch: list, tokens: int, budget: int
) -> None:
    requests = [request(plan, f"r{i}") for i, (plan, _, _) in enumerate(batch)]
    scheduling = scheduling_of(budget, *requests, tokens=tokens)
    rows = taken = 0
    for plan, computed, num_tokens in batch:
        granted = min(num_tokens, tokens - taken)
        taken += granted
        rows += plan.rows_in(computed, computed + granted)
    assert scheduling.counts or rows <= budget
    for one in requests:
        scheduling.free(one)
    assert not scheduling.counts


def test_requests_without_a_plan_are_not_limited() -> None:
    plain, pooled = request(None), request(None, "pooled")
    pooled.sampling_params = None
    scheduling = scheduling_of(0, plain, pooled)
    assert scheduling.limit(plain, 0, 7) == scheduling.limit(pooled, 0, 7) == 7
    assert not scheduling.ended("r")


def test_a_request_that_finished_is_not_limited_and_has_an_end_if_it_is_taken() -> None:
    for reader, is_taken in (("a", True), (READOUTS, False)):
        one = request(plan_for({reader: {(0, "pre_attn"): ((0, 5),)}}, PROMPT))
        scheduling = scheduling_of(2, one)
        assert scheduling.limit(one, 0, 5) == 2
        scheduling.free(one)
        assert scheduling.limit(one, 0, 5) == 5
        assert [scheduling.ended("r"), scheduling.ended("r")] == [is_taken, False]


@given(plans, st.integers(0, END))
def test_cached_blocks_end_where_captured_rows_begin(
    plan: CapturePlan, num_tokens: int
) -> None:
    usable = cacheable_tokens(request(plan), num_tokens)
    assert plan.rows_in(0, min(usable, PROMPT)) == 0
    first = plan.first_prompt_row
    assert usable == (num_tokens if first is None else min(num_tokens, first))


def test_ends_travel_once() -> None:
    scheduling = CaptureScheduling(1, 1)
    end = CaptureEnd("r", "", [], 0, "stop", [])
    assert scheduling.take_ends() == []
    scheduling.add_ends([end])
    assert scheduling.take_ends() == [end]
    assert scheduling.take_ends() == []


@given(plans, st.integers(0, PROMPT), st.integers(0, PROMPT))
def test_nothing_is_loaded_from_outside_that_has_captured_rows(
    plan: CapturePlan, local: int, external: int
) -> None:
    loaded = loadable_tokens(request(plan), local, external)
    first = plan.first_prompt_row
    fits = first is None or local + external <= first
    assert loaded == (external if fits else 0)

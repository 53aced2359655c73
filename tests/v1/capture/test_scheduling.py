# SPDX-License-Identifier: Apache-2.0
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.v1.capture._strategies import plan_for, wanted
from vllm.v1.capture.plan import CapturePlan
from vllm.v1.capture.scheduling import (
    CaptureScheduling,
    cacheable_tokens,
    loadable_tokens,
)
from vllm.v1.capture.wire import CaptureEnd

PROMPT, END = 6, 20


def request(plan: CapturePlan | None) -> Any:
    return SimpleNamespace(sampling_params=SimpleNamespace(_capture_plan=plan))


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
    scheduling = CaptureScheduling(budget)
    assert scheduling.limit(request(plan), computed, num_tokens) == max(fits)


@given(st.lists(st.tuples(plans, st.integers(0, END), st.integers(0, 10))))
def test_a_step_never_captures_more_rows_than_its_budget(batch: list) -> None:
    scheduling, rows = CaptureScheduling(20), 0
    for plan, computed, num_tokens in batch:
        granted = scheduling.limit(request(plan), computed, num_tokens)
        scheduling.scheduled(request(plan), computed, granted)
        wanted = [plan.rows_in(computed, computed + n) for n in range(num_tokens + 1)]
        assert granted == max(n for n, more in enumerate(wanted) if rows + more <= 20)
        rows += wanted[granted]
    assert rows <= 20


@given(plans, st.integers(12, 40))
def test_step_by_step_every_token_is_scheduled(plan: CapturePlan, budget: int) -> None:
    scheduling, computed, steps = CaptureScheduling(budget), 0, 0
    while computed < END:
        scheduling.new_step()
        granted = scheduling.limit(request(plan), computed, END - computed)
        assert granted > 0, "a request that admission let in cannot go on"
        scheduling.scheduled(request(plan), computed, granted)
        computed, steps = computed + granted, steps + 1
    total = plan.rows_in(0, END)
    assert steps <= max(1, 2 * -(-total // budget) + 1)


def test_requests_without_a_plan_are_not_limited() -> None:
    scheduling = CaptureScheduling(0)
    assert scheduling.limit(request(None), 0, 7) == 7
    assert scheduling.limit(SimpleNamespace(sampling_params=None), 0, 7) == 7  # type: ignore[arg-type]


@given(plans, st.integers(0, END))
def test_cached_blocks_end_where_captured_rows_begin(
    plan: CapturePlan, num_tokens: int
) -> None:
    usable = cacheable_tokens(request(plan), num_tokens)
    assert plan.rows_in(0, min(usable, PROMPT)) == 0
    first = plan.first_prompt_row
    assert usable == (num_tokens if first is None else min(num_tokens, first))


def test_ends_travel_once() -> None:
    scheduling = CaptureScheduling(1)
    end = CaptureEnd("r", "", [], 0, "stop", [])
    assert scheduling.take_ends() is None
    scheduling.add_ends([end])
    assert scheduling.take_ends() == [end]
    assert scheduling.take_ends() is None


@given(plans, st.integers(0, PROMPT), st.integers(0, PROMPT))
def test_nothing_is_loaded_from_outside_that_has_captured_rows(
    plan: CapturePlan, local: int, external: int
) -> None:
    loaded = loadable_tokens(request(plan), local, external)
    first = plan.first_prompt_row
    fits = first is None or local + external <= first
    assert loaded == (external if fits else 0)

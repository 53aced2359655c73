# SPDX-License-Identifier: Apache-2.0
"""Little staging memory and little KV cache: slower, but nothing is lost."""

from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.support import asynchronous
from tests.support.captured import CapturedEngine, asking, prompt
from vllm import SamplingParams

pytestmark = pytest.mark.e2e

ROW_BYTES = 64 * 4
TAPS = 9
TOKENS_A_STEP = 4


@pytest.fixture(scope="module", params=["sync", "async"])
def tight(request: pytest.FixtureRequest, model: Path) -> Iterator[CapturedEngine]:
    with asynchronous.allowed():
        engine = CapturedEngine(
            model,
            capture_staging_bytes=2 * TOKENS_A_STEP * TAPS * ROW_BYTES,
            num_gpu_blocks_override=8,
            max_model_len=128,
            async_scheduling=request.param == "async",
            vllm_lens_api=True,
        )
    yield engine
    engine.close()


def scheduler_of(engine: CapturedEngine) -> Any:
    core: Any = engine.llm.llm_engine.engine_core
    return core.engine_core.scheduler


@pytest.fixture
def scheduled(tight: CapturedEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens of each step."""
    scheduler, counts = scheduler_of(tight), []
    schedule = scheduler.schedule

    def counted(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        counts.append(output.total_num_scheduled_tokens)
        return output

    monkeypatch.setattr(scheduler, "schedule", counted)
    return counts


def test_a_prompt_larger_than_the_staging_memory_is_spread_over_steps(
    tight: CapturedEngine, scheduled: list[int]
) -> None:
    (output,) = tight.run([prompt(50, seed=300)], asking("all", max_tokens=3))
    tight.check(output)
    assert max(scheduled) == TOKENS_A_STEP


def test_positions_that_are_not_captured_cost_no_staging_memory(
    tight: CapturedEngine, scheduled: list[int]
) -> None:
    (output,) = tight.run([prompt(50, seed=301)], asking("last_prompt", max_tokens=2))
    tight.check(output, [49])
    assert max(scheduled) == 50


@pytest.mark.timeout(120)
def test_a_block_of_states_whose_rows_never_fit_a_step_is_computed_in_parts(
    tight: CapturedEngine, scheduled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # As for a state-space model with prefix caching: chunks end with blocks.
    scheduler = scheduler_of(tight)
    monkeypatch.setattr(scheduler, "need_mamba_block_aligned_split", True)
    (output,) = tight.run([prompt(70, seed=302)], asking("all", max_tokens=3))
    tight.check(output)
    assert {32, 64, 70} <= set(accumulate(scheduled))


def test_more_requests_than_fit_a_step_take_turns(tight: CapturedEngine) -> None:
    prompts = [prompt(10, seed=310 + i) for i in range(7)]
    for output in tight.run(prompts, asking("all", max_tokens=6)):
        tight.check(output)


@pytest.mark.parametrize("positions", ["all", "all_generated", "all_prompt"])
def test_a_request_that_was_preempted_has_each_row_once(
    tight: CapturedEngine, monkeypatch: pytest.MonkeyPatch, positions: str
) -> None:
    scheduler = scheduler_of(tight)
    preempt = Mock(wraps=scheduler._preempt_request)
    monkeypatch.setattr(scheduler, "_preempt_request", preempt)
    prompts = [prompt(60, seed=320 + i) for i in range(3)]
    outputs = tight.run(prompts, asking(positions, max_tokens=40))
    assert preempt.called, "the test is pointless without a preemption"
    wanted = {
        "all": range(99),
        "all_generated": range(60, 99),
        "all_prompt": range(60),
    }[positions]
    for output in outputs:
        tight.check(output, wanted)


def test_a_function_sees_each_row_of_a_preempted_request_once(
    tight: CapturedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def note(ctx: Any, h: Any) -> None:
        ctx.saved.setdefault("positions", []).extend(ctx.positions)

    scheduler = scheduler_of(tight)
    preempt = Mock(wraps=scheduler._preempt_request)
    monkeypatch.setattr(scheduler, "_preempt_request", preempt)
    hooks = {"apply_hooks": [{"fn": note, "layer_indices": [1]}]}
    params = SamplingParams(max_tokens=40, ignore_eos=True, extra_args=hooks)
    outputs: Any = tight.run([prompt(60, seed=330 + i) for i in range(3)], params)
    assert preempt.called, "the test is pointless without a preemption"
    for output in outputs:
        # A step that is in flight when its request ends may be seen as well.
        assert output.hook_results["0"]["positions"][:99] == list(range(99))

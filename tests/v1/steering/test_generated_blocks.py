# SPDX-License-Identifier: Apache-2.0
"""Blocks of generated tokens are shared where consumers may steer within the step."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.support.plugins import install
from tests.v1.steering import _engine, _models
from tests.v1.steering._engine import generate, logprobs, params, tokens

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

BLOCK, BLOCKS = 32, 11
PROMPT = [(5 * i + 3) % _models.VOCAB for i in range(3 * BLOCK + 5)]
OTHER = [(7 * i + 1) % _models.VOCAB for i in range(3 * BLOCK + 5)]

SOURCE = f"""
import os
from pathlib import Path

import numpy as np

from vllm.v1.capture import CaptureSpec
from vllm.v1.capture.consumer import SyncCaptureConsumer
from vllm.v1.worker.steering_action_queue import (
    RequestSteeringOverride,
    SteeringVectorUpdate,
)

VECTOR = np.random.default_rng(3).normal(size={_models.HIDDEN}).astype("f4") * 3
VECTORS = {{"post_block": {{0: VECTOR}}}}
MAKE = {{
    "all": lambda req_id: SteeringVectorUpdate(VECTORS),
    "one": lambda req_id: RequestSteeringOverride(req_id, VECTORS),
    "nothing": lambda req_id: SteeringVectorUpdate({{"post_block": {{0: 0 * VECTOR}}}}),
}}


class Decider(SyncCaptureConsumer):
    req_id, fed = "", 0

    def global_capture_spec(self):
        return CaptureSpec(hooks={{"post_block": [0]}}, positions="all_generated")

    def on_step(self, view):
        (one, *_) = view.requests
        self.fed = 1 + (self.fed if one.req_id == self.req_id else 0)
        self.req_id = one.req_id
        kind, after = Path(os.environ["DECIDES"]).read_text().split()
        return [MAKE[kind](one.req_id)] if self.fed == int(after) else None
"""

ENGINES = {
    "ahead": {"async_scheduling": True},
    "in turn": {"async_scheduling": False},
    "two ranks": {"tensor_parallel_size": 2},
    "two stages": {
        "pipeline_parallel_size": 2,
        "async_scheduling": False,
        # Upstream's CPU runner lacks the tensors between stages without a compilation.
        "enforce_eager": False,
        "compilation_config": {"backend": "eager"},
    },
}
"""`ahead` schedules a step before the output of the last one is there."""
MARKS = {"in turn": pytest.mark.soak}
SEVERAL = ("two ranks", "two stages")
MARKS |= dict.fromkeys(SEVERAL, pytest.mark.multiprocess)


@pytest.fixture(
    scope="module",
    params=[pytest.param(one, marks=MARKS.get(one, ())) for one in ENGINES],
)
def llm(tmp_path_factory: pytest.TempPathFactory, request: Any) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("plugin")
    install(folder, "decider_plugin", SOURCE, decider="decider_plugin:Decider")
    options = ENGINES[request.param]
    with pytest.MonkeyPatch.context() as context:
        context.syspath_prepend(str(folder))
        context.setenv("PYTHONPATH", os.pathsep.join([str(folder), *sys.path]))
        context.setenv("DECIDES", str(folder / "decides"))
        (folder / "decides").write_text("nothing 1")
        llm = _engine.engine(
            _models.save("llama", tmp_path_factory.mktemp("llama")),
            enable_prefix_caching=True,
            block_size=BLOCK,
            num_gpu_blocks_override=BLOCKS,
            capture_consumers=["decider"],
            gpu_memory_utilization=0.2,
            distributed_executor_backend="mp" if request.param in SEVERAL else "uni",
            **options,
        )
        yield llm
        llm.llm_engine.engine_core.shutdown()


@pytest.fixture
def decide(llm: Any) -> Iterator[Any]:
    """Sets what is decided when so many generated tokens were fed."""

    def decide(kind: str, after: int) -> None:
        Path(os.environ["DECIDES"]).write_text(f"{kind} {after}")

    assert llm.reset_prefix_cache()
    yield decide
    decide("nothing", 1)
    run(llm, OTHER, 3)


def run(llm: Any, prompt: list[int], max_tokens: int = 2 * BLOCK) -> Any:
    (output,) = generate(llm, [prompt], [params(max_tokens)])
    return output


def assert_cold(llm: Any, found: Any, prompt: list[int]) -> None:
    """It equals a run without the prefix cache, which nothing steers."""
    assert llm.reset_prefix_cache()
    cold = run(llm, prompt, 6)
    assert cold.num_cached_tokens == 0 and tokens(found) == tokens(cold)
    assert (logprobs(found) - logprobs(cold)).abs().max() < 1e-4


def follow_up(first: Any, prompt: list[int] = PROMPT) -> list[int]:
    return [*prompt, *tokens(first), 7, 8, 9]


FULL = (len(PROMPT) + 2 * BLOCK - 1) // BLOCK * BLOCK
"""The tokens of full blocks of a prompt and what was generated and fed."""


def test_where_nothing_acts_the_next_turn_finds_generated_blocks(
    llm: Any, decide: Any
) -> None:
    prompt = follow_up(run(llm, PROMPT))
    found = run(llm, prompt, 6)
    assert found.num_cached_tokens == FULL
    assert_cold(llm, found, prompt)


@pytest.mark.parametrize("kind", ["all", "one"])
def test_the_next_turn_finds_only_what_was_computed_before_an_action(
    llm: Any, decide: Any, kind: str
) -> None:
    plain = run(llm, PROMPT)
    assert llm.reset_prefix_cache()
    decide(kind, 40)  # The first block with generated tokens is full after 27.
    first = run(llm, PROMPT)
    assert tokens(first) != tokens(plain)
    found = run(llm, follow_up(first), 1)
    assert found.num_cached_tokens == 4 * BLOCK
    decide("nothing", 1)
    run(llm, OTHER, 3)
    found = run(llm, follow_up(first), 6)
    assert_cold(llm, found, follow_up(first))


def test_a_preempted_request_goes_on_under_what_acts(llm: Any, decide: Any) -> None:
    decide("all", 1)
    run(llm, OTHER, 3)
    alone = [run(llm, prompt) for prompt in (PROMPT, OTHER)]
    assert llm.reset_prefix_cache()
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    preempt = scheduler._preempt_request
    with patch.object(scheduler, "_preempt_request", wraps=preempt) as preempted:
        both = generate(llm, [PROMPT, OTHER], [params(2 * BLOCK)] * 2)
    assert preempted.called
    for found, expected in zip(both, alone):
        assert tokens(found) == tokens(expected)
        assert (logprobs(found) - logprobs(expected)).abs().max() < 1e-4

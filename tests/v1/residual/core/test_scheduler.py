# SPDX-License-Identifier: Apache-2.0
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm.config.capture import CaptureConfig
from vllm.config.readouts import ReadoutConfig
from vllm.config.steering import SteeringConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.readouts.core.scheduler import ReadOut
from vllm.v1.request import RequestStatus
from vllm.v1.residual.core.scheduler import (
    NO_SCHEDULING,
    Scheduling,
    open_scheduling,
)

OUTPUT = {
    "readouts": None,
    "receipts": None,
    "num_nans_in_logits": None,
    "failed": None,
}


def scheduler_of(
    steers: bool = False, captures: bool = False, embeds: bool = False
) -> Any:
    """The parts of a scheduler that its facade reads."""
    model = SimpleNamespace(enable_prompt_embeds=embeds, get_hidden_size=lambda: 8)
    model.dtype = torch.float32
    config = SimpleNamespace(
        capture_config=CaptureConfig(readouts=captures),
        steering_config=SteeringConfig(enabled=steers),
        readout_config=ReadoutConfig(),
        model_config=model,
        scheduler_config=SimpleNamespace(max_num_batched_tokens=16),
        kv_transfer_config=None,
        max_concurrent_batches=2,
    )
    return SimpleNamespace(
        vllm_config=config,
        kv_cache_config=SimpleNamespace(
            has_mamba_layers=False, has_mixed_precision_kv_cache=False
        ),
        kv_cache_manager=SimpleNamespace(get_block_ids=lambda name: ([1, 2],)),
        hash_block_size=4,
    )


def request(**more: Any) -> Any:
    own = {"request_id": "r", "sampling_params": None, "prompt_embeds": None}
    return SimpleNamespace(**{**own, "status": RequestStatus.RUNNING, **more})


def test_without_features_there_is_the_null_object() -> None:
    assert open_scheduling(scheduler_of()) is NO_SCHEDULING
    for feature in ("steers", "captures", "embeds"):
        assert isinstance(open_scheduling(scheduler_of(**{feature: True})), Scheduling)


@pytest.mark.parametrize("scheduler", [Scheduler, AsyncScheduler])
def test_a_scheduler_made_without_its_constructor_has_the_null_object(
    scheduler: Any,
) -> None:
    assert scheduler.__new__(scheduler).residual is NO_SCHEDULING


def test_tokens_sampled_from_nan_are_dropped_and_end_the_request() -> None:
    on = open_scheduling(scheduler_of(embeds=True))
    one = request(prompt_embeds=object(), resumable=True)
    on.begin(one, 0, 1)
    output = SimpleNamespace(**{**OUTPUT, "num_nans_in_logits": {"r": 3}})
    assert on.sampled(one, output, 1, [4]) == []
    assert on.stops(one, False) and one.status is RequestStatus.FINISHED_ERROR
    assert on.take_nonfinite() == ({"r": ([1, 2],)}, {})
    assert on.take_nonfinite() == ({}, {})


class Fires:
    """Readouts of a step that end every request after its first token."""

    def __contains__(self, request_id: str) -> bool:
        return True

    def take(self, request: Any, step: Any, count: int, token_ids: list) -> ReadOut:
        return ReadOut(token_ids[:1], "readout:p")


def test_a_readout_ends_a_request_unless_something_else_has() -> None:
    on: Any = open_scheduling(scheduler_of(captures=True))
    on.readouts = Fires()
    output = SimpleNamespace(**{**OUTPUT, "readouts": object()})
    for stopped, reason in ((True, None), (False, "readout:p")):
        one = request(stop_reason=None)
        assert on.sampled(one, output, 2, [4, 5]) == [4]
        assert on.stops(one, stopped) and one.stop_reason == reason
        assert not on.stops(one, False), "the reason is of one step"


def test_a_step_without_requests_carries_nothing() -> None:
    on = open_scheduling(scheduler_of(steers=True))
    output = SimpleNamespace(scheduled_new_reqs=[], new_block_ids_to_zero=[5, 6])
    on.complete(output)
    assert output.new_block_ids_to_zero is None, "no request has changed a stream"
    assert output.residual == (None, None, False)

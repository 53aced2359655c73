# SPDX-License-Identifier: Apache-2.0
"""A change of the global vectors applies on every rank or on none."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.v1.steering._ranks import Core
from vllm.v1.engine import EngineCoreOutputs, FinishReason
from vllm.v1.steering.core.engine import (
    commit_steering,
    get_steering,
    hold_steering,
    refuses,
    release_steering,
    set_steering,
)
from vllm.v1.steering.core.prefix_cache import EngineSteering
from vllm.v1.steering.core.refusals import refusal_in
from vllm.v1.steering.errors import SteeringChangeError, SteeringValidationError
from vllm.v1.steering.plan import NO_STEERING, SteeringTiers, pack


@pytest.fixture(autouse=True)
def clean() -> Any:
    yield
    EngineSteering.set(NO_STEERING)


def vectors(value: float, layer: int = 0, keep_zeros: bool = False) -> Any:
    vector = np.full(4, value, dtype=np.float32)
    return pack({(layer, "post_block"): vector}, keep_zeros=keep_zeros)


def test_what_is_given_replaces_what_is_at_the_same_point() -> None:
    core: Any = Core()
    set_steering(core, SteeringTiers(base=vectors(1), decode=vectors(5)), False)
    set_steering(core, SteeringTiers(base=vectors(2, layer=1)), False)
    told = set_steering(core, SteeringTiers(base=vectors(3)), False)
    assert told == get_steering(core)
    assert told["vectors"]["post_block"] == {"0": {"norm": 6}, "1": {"norm": 4}}
    assert told["decode_vectors"]["post_block"] == {"0": {"norm": 10}}
    zeros = vectors(0, layer=1, keep_zeros=True)
    told = set_steering(core, SteeringTiers(base=zeros), False)
    assert list(told["vectors"]["post_block"]) == ["0"]
    assert not any(
        set_steering(core, SteeringTiers(), True)[name]
        for name in ("vectors", "prefill_vectors", "decode_vectors")
    )


def test_the_prefix_cache_is_reset_only_if_prompts_are_steered_otherwise() -> None:
    core: Any = Core()
    set_steering(core, SteeringTiers(decode=vectors(1)), False)
    assert core.cache_resets == 0
    set_steering(core, SteeringTiers(prefill=vectors(1)), False)
    assert core.cache_resets == 1


class Answering(Core):
    """A core that records the requests that it answers with an error."""

    def __init__(self) -> None:
        super().__init__(torch.float16)
        self.refused: list[tuple[int, str]] = []
        self.output_queue = SimpleNamespace(put_nowait=self._answer)

    def _answer(self, sent: tuple[int, EngineCoreOutputs]) -> None:
        client, outputs = sent
        (one,) = outputs.outputs
        assert outputs.finished_requests == {one.request_id}
        assert one.finish_reason is FinishReason.ERROR
        sample = SimpleNamespace(finish_reason="error", stop_reason=one.stop_reason)
        output: Any = SimpleNamespace(outputs=[sample])
        self.refused.append((client, str(refusal_in(output, "steering_name"))))


def request(tiers: SteeringTiers | None) -> Any:
    params = SimpleNamespace(_steering=tiers, _hooks=None)
    return SimpleNamespace(request_id="r", client_index=3, sampling_params=params)


def test_a_request_that_arrives_with_too_much_is_answered_and_not_scheduled() -> None:
    core: Any = Answering()
    large = SteeringTiers(prefill=vectors(60000))  # float16 ends at 65504
    assert not refuses(core, request(large))
    set_steering(core, SteeringTiers(base=vectors(60000)), False)
    assert not refuses(core, request(None))
    assert not refuses(core, request(SteeringTiers(prefill=vectors(-60000))))
    assert not refuses(core, request(SteeringTiers(prefill=vectors(60000, layer=1))))
    assert core.refused == []
    assert refuses(core, request(large))
    ((client, said),) = core.refused
    assert client == 3
    assert said.startswith("steering_name: with the engine's vectors, what is added")
    assert "prefill tokens at post_block of layer 0" in said
    assert "GET /v1/steering" in said


def test_nothing_is_written_while_the_engine_sleeps() -> None:
    core: Any = Core()
    set_steering(core, SteeringTiers(base=vectors(1)), False)
    before = core.content()
    core.model_executor.sleeping_tags = {"weights", "kv_cache"}
    with pytest.raises(SteeringValidationError, match="wake it up first"):
        set_steering(core, SteeringTiers(base=vectors(2)), False)
    with pytest.raises(SteeringValidationError, match="wake it up first"):
        hold_steering(core, "front end", SteeringTiers(base=vectors(2)), False)
    assert core.content() == before and core.scheduler.residual.steering.held is None
    # Any wake_up restores the tables, here one that leaves the KV cache asleep.
    core.model_executor.sleeping_tags = {"kv_cache"}
    set_steering(core, SteeringTiers(base=vectors(2)), False)
    assert core.content() != before


def test_a_change_that_is_held_is_not_made_in_sleep() -> None:
    core: Any = Core()
    before = core.content()
    assert hold_steering(core, "front end", SteeringTiers(base=vectors(2)), False)
    core.model_executor.sleeping_tags = {"weights", "kv_cache"}
    with pytest.raises(SteeringChangeError, match="sleeps"):
        commit_steering(core, "front end")
    assert core.content() == before and not core.scheduler.residual.steering.tiers
    release_steering(core, "front end", undo=True)
    assert core.scheduler.residual.steering.held is None

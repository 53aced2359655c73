# SPDX-License-Identifier: Apache-2.0
from types import SimpleNamespace
from typing import Any

import numpy as np

from vllm.v1.steering.plan import SteeringTiers, pack
from vllm.v1.steering.scheduling import SteeringScheduling


def request(name: str, config: int | None) -> Any:
    tiers = None
    if config is not None:
        vector = np.full(4, float(config), dtype=np.float32)
        tiers = SteeringTiers(base=pack({(0, "post_block"): vector}))
    params = SimpleNamespace(_steering=tiers)
    return SimpleNamespace(request_id=name, sampling_params=params, num_prompt_tokens=3)


def test_once_one_waits_those_behind_it_wait_too_but_unsteered_pass() -> None:
    steering = SteeringScheduling(num_slots=1)
    steering.new_step()
    first = request("first", 1)
    assert steering.admits(first)
    steering.begin(first)
    assert not steering.admits(request("blocked", 2))
    assert not steering.admits(request("shares", 1)), "it would overtake"
    assert steering.admits(request("plain", None))


def test_the_one_that_waited_is_next_when_a_slot_is_free() -> None:
    steering = SteeringScheduling(num_slots=1)
    first, second = request("first", 1), request("second", 2)
    steering.new_step()
    steering.begin(first)
    steering.release(first)
    steering.new_step()
    assert steering.admits(second)
    steering.begin(second)
    step = steering.take_step()
    assert step is not None
    assert [slot for slot, _ in step.loads] == [0, 0]
    assert step.uses["second"].slot == 0
    assert step.uses["second"].num_prompt_tokens == 3


def test_a_preempted_request_gives_its_slot_back_and_takes_one_again() -> None:
    steering = SteeringScheduling(num_slots=1)
    one = request("one", 1)
    steering.new_step()
    steering.begin(one)
    steering.preempted(one)
    assert steering.slots.in_use == 0
    steering.take_step()
    steering.begin(one)
    step = steering.take_step()
    assert step is not None and not step.loads, "its rows are still there"
    steering.release(one)
    steering.release(one)
    assert steering.slots.in_use == 0


def test_a_step_without_new_steered_requests_sends_nothing() -> None:
    steering = SteeringScheduling(num_slots=1)
    steering.new_step()
    steering.begin(request("plain", None))
    assert steering.take_step() is None

# SPDX-License-Identifier: Apache-2.0
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.residual.receipts import WAITING
from vllm.v1.steering.core import prefix_cache, scheduler
from vllm.v1.steering.core.prefix_cache import EngineSteering, extra_keys
from vllm.v1.steering.core.scheduler import SteeringScheduling, take_vectors_off
from vllm.v1.steering.plan import NO_STEERING, SteeringTiers, pack, tiers_of


def request(name: str, config: int | None) -> Any:
    tiers = None
    if config is not None:
        vector = np.full(4, float(config), dtype=np.float32)
        tiers = SteeringTiers(base=pack({(0, "post_block"): vector}))
    params = SimpleNamespace(_steering=tiers, _hooks=None)
    return SimpleNamespace(request_id=name, sampling_params=params, num_prompt_tokens=3)


def test_once_one_waits_those_behind_it_wait_too_but_unsteered_pass() -> None:
    steering = SteeringScheduling(num_slots=1)
    said = mock.patch("vllm.v1.steering.core.scheduler.logger.warning").start()
    steering.new_step()
    first = request("first", 1)
    assert steering.admits(first)
    steering.begin(first)
    assert not steering.admits(request("blocked", 2))
    assert not steering.admits(request("shares", 1)), "it would overtake"
    steering.new_step()
    assert not steering.admits(request("blocked", 2))
    mock.patch.stopall()
    assert said.call_count == 1 and "--max-steering-configs" in said.call_args[0][0]
    assert steering.take_fired() == [(*WAITING, 2)], "two steps"
    assert steering.take_fired() == [] and not steering.fired
    assert steering.admits(request("plain", None))


def test_a_step_loads_only_its_share_of_the_slots() -> None:
    steering = SteeringScheduling(num_slots=4, most_loads=2)
    requests = [request(f"{number}", number) for number in range(3)]
    for one in requests[:2]:
        assert steering.admits(one)
        steering.begin(one)
    assert not steering.admits(requests[2]) and steering.admits(request("plain", None))
    steering.take_step()
    steering.new_step()
    assert steering.admits(requests[2]), "the next step has the other half"


def test_the_engines_operations_leave_less_room_for_those_of_requests() -> None:
    steering = SteeringScheduling(num_slots=1, bank_bytes=48)
    small, large = (mock.Mock(bank_bytes=size) for size in (16, 32))
    steering.change(small, scheduler.HeldChange("another's", small, large))
    assert not steering.slots.has_room("a request's", 20)
    steering.change(small, None)
    assert steering.slots.has_room("a request's", 20)


def test_workers_are_not_sent_the_vectors_of_requests() -> None:
    requests = [request("steered", 1), request("plain", None)]
    sent = [SimpleNamespace(sampling_params=r.sampling_params) for r in requests]
    # A pooling request.
    take_vectors_off([*sent, SimpleNamespace(sampling_params=None)])
    assert [one.sampling_params._steering for one in sent] == [None, None]
    assert tiers_of(requests[0]) is not None, "the scheduler still needs them"


def test_a_step_without_new_steered_requests_sends_nothing() -> None:
    steering = SteeringScheduling(num_slots=1)
    steering.new_step()
    steering.begin(request("plain", None))
    assert steering.take_step() is None


STORIES = st.lists(
    st.tuples(
        st.integers(0, 6),  # steps after the one before
        st.none() | st.integers(0, 4),  # configuration
        st.integers(1, 5),  # steps it runs
        st.sampled_from(["ends", "ends", "is aborted waiting", "is preempted once"]),
    ),
    min_size=1,
    max_size=20,
)


@given(story=STORIES, num_slots=st.integers(1, 3))
def test_requests_start_in_order_and_none_starves(story: list, num_slots: int) -> None:
    steering = SteeringScheduling(num_slots)
    arrivals, at = [], 0
    for number, (gap, config, steps, fate) in enumerate(story):
        at += gap
        arrivals.append((at, request(str(number), config), steps, fate))
    left = {each.request_id: steps for _, each, steps, _ in arrivals}
    fates = {each.request_id: fate for _, each, _, fate in arrivals}
    waiting: list[Any] = []
    running: list[Any] = []
    # Each request waits at most for all steps of those before it.
    limit = at + sum(left.values()) * 2 + len(left) + 1
    for now in range(limit):
        waiting += [each for when, each, _, _ in arrivals if when == now]
        for each in list(waiting):
            if fates[each.request_id] == "is aborted waiting" and now % 2:
                waiting.remove(each)
                steering.release(each)
        step_of(steering, waiting, running, num_slots)
        for each in list(running):
            name = each.request_id
            left[name] -= 1
            if fates[name] == "is preempted once" and left[name] == 1:
                fates[name] = "ends"
                running.remove(each)
                steering.preempted(each)
                waiting.insert(0, each)
            elif left[name] == 0:
                running.remove(each)
                steering.release(each)
    assert not waiting and not running, "somebody starved"
    assert steering.slots.in_use == 0


def step_of(
    steering: SteeringScheduling, waiting: list, running: list, num_slots: int
) -> None:
    """Schedule a step like the scheduler, and check which requests may run."""
    steering.new_step()
    passed_over = False
    for each in list(waiting):
        steered = each.sampling_params._steering is not None
        held = {one.sampling_params._steering for one in running} - {None}
        if steering.admits(each):
            assert not (steered and passed_over), "it overtakes one that waits"
            waiting.remove(each)
            running.append(each)
            steering.begin(each)
        else:
            assert steered, "what is not steered never waits"
            if not passed_over:
                assert len(held) == num_slots, "a slot was free"
                assert each.sampling_params._steering not in held
            passed_over = True
    held = {one.sampling_params._steering for one in running} - {None}
    assert steering.slots.in_use == len(held) <= num_slots
    sent = steering.take_step()
    assert sent is None or len(sent.loads) <= len(sent.uses)


def test_a_session_shares_no_block_once_phases_are_steered_differently() -> None:
    vector = pack({(0, "post_block"): np.ones(4, dtype=np.float32)})
    try:
        for tiers, alone in [
            (SteeringTiers(), False),
            (SteeringTiers(base=vector), False),
            (SteeringTiers(prefill=vector), True),
            (SteeringTiers(decode=vector), True),
        ]:
            EngineSteering.set(tiers)
            session = request("session", None)
            prefix_cache.continue_session(session)
            keys = extra_keys(session, 0, 16)
            assert (("steering-changed", "session:session") in keys) == alone
    finally:
        EngineSteering.set(NO_STEERING)

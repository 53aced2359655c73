# SPDX-License-Identifier: Apache-2.0
"""A change of the engine's vectors holds on every rank or on none."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm.config.steering import SteeringConfig
from vllm.v1.steering.caching import EngineSteering
from vllm.v1.steering.engine import get_steering, set_steering
from vllm.v1.steering.plan import NO_STEERING, SteeringTiers, pack
from vllm.v1.steering.scheduling import SteeringScheduling


class Core:
    """An engine core whose ranks answer a staged change as told."""

    def __init__(self, answers: list[str | None]) -> None:
        self.answers = answers
        self.calls: list[tuple[str, Any]] = []
        self.cache_resets = 0
        self.scheduler = SimpleNamespace(
            steering=SteeringScheduling(2),
            requests={},
            hash_block_size=16,
            reset_prefix_cache=self._reset,
        )
        self.model_executor = SimpleNamespace(collective_rpc=self._rpc)
        self.vllm_config = SimpleNamespace(
            steering_config=SteeringConfig(enabled=True, max_configs=2)
        )

    def _reset(self) -> bool:
        self.cache_resets += 1
        return True

    def _rpc(self, method: Any, args: tuple[Any, ...]) -> list[str | None]:
        self.calls.append((method.__name__, args[0]))
        return self.answers if method.__name__ == "stage_steering" else []


@pytest.fixture(autouse=True)
def clean() -> Any:
    yield
    EngineSteering.set(NO_STEERING)


def vectors(value: float, layer: int = 0, keep_zeros: bool = False) -> Any:
    vector = np.full(4, value, dtype=np.float32)
    return pack({(layer, "post_block"): vector}, keep_zeros=keep_zeros)


def test_a_failure_on_one_rank_changes_nothing() -> None:
    core: Any = Core([None, "out of memory"])
    with pytest.raises(RuntimeError, match="out of memory"):
        set_steering(core, SteeringTiers(base=vectors(1)), False)
    assert core.calls[-1] == ("commit_steering", False)
    assert not core.scheduler.steering.tiers and not EngineSteering.tiers
    assert core.cache_resets == 0


def test_what_is_given_replaces_what_is_at_the_same_point() -> None:
    core: Any = Core([None])
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
    core: Any = Core([None])
    set_steering(core, SteeringTiers(decode=vectors(1)), False)
    assert core.cache_resets == 0
    set_steering(core, SteeringTiers(prefill=vectors(1)), False)
    assert core.cache_resets == 1

# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from vllm.v1.steering.errors import SteeringChangeError, SteeringValidationError
from vllm.v1.steering.global_vectors import SharedVectors
from vllm.v1.steering.plan import NO_STEERING, SteeringTiers, pack


def tiers(value: float) -> SteeringTiers:
    return SteeringTiers(base=pack({(0, "pre_attn"): np.full(4, value, np.float32)}))


def test_both_may_hold_while_a_change_is_in_flight() -> None:
    shared = SharedVectors()
    with shared.changing(tiers(1), replace=False):
        assert shared.possible == (NO_STEERING, tiers(1))
    assert shared.possible == (tiers(1),)
    with shared.changing(tiers(1), replace=False):
        assert shared.possible == (tiers(1),)
    with shared.changing(NO_STEERING, replace=True):
        assert shared.possible == (tiers(1), NO_STEERING)
    assert shared.possible == (NO_STEERING,)


@pytest.mark.parametrize("kind", [SteeringChangeError, SteeringValidationError])
def test_a_change_that_was_refused_leaves_what_was(kind: type[Exception]) -> None:
    shared = SharedVectors()
    with pytest.raises(kind), shared.changing(tiers(1), replace=False):
        raise kind("refused")
    assert shared.possible == (NO_STEERING,)


def test_after_a_change_without_an_answer_both_may_hold_until_it_is_known() -> None:
    shared = SharedVectors()
    with pytest.raises(TimeoutError), shared.changing(tiers(1), replace=False):
        raise TimeoutError
    assert shared.possible == (NO_STEERING, tiers(1))
    with shared.changing(tiers(2), replace=True):
        pass
    assert shared.possible == (tiers(2),)

# SPDX-License-Identifier: Apache-2.0
"""Steered requests equal transformers with the vectors added by hooks."""

from typing import Any

import pytest
import torch

from tests.v1.steering import _models
from tests.v1.steering._engine import compared, generate, logprobs, params
from tests.v1.steering._models import vector
from vllm.v1.steering.errors import SteeringValidationError

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

HOOKS = ("pre_attn", "post_attn", "post_block")
PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26, 43]
TIERS = ("steering_vectors", "prefill_steering_vectors", "decode_steering_vectors")


def test_tiers_and_the_engines_vectors_add_up(steered: Any) -> None:
    llm, reference = steered
    v = [vector(seed) for seed in range(6)]

    def at(x: torch.Tensor, scale: float = 1.0) -> Any:
        return {"post_block": {"1": {"vector": x, "scale": scale}}}

    llm.set_steering(at(v[0]), at(v[1], 2.0), at(v[2], -1.0))
    request = dict(zip(TIERS, map(at, v[3:]), strict=True))
    try:
        own, other = generate(llm, [PROMPT] * 2, [params(**request), params()])
    finally:
        llm.clear_steering()
    shared = (v[0] + 2 * v[1], v[0] - v[2])
    both = (shared[0] + v[3] + v[4], shared[1] + v[3] + v[5])
    for output, (prefill, decode) in ((own, both), (other, shared)):
        change = _models.add_by_phase(len(PROMPT), prefill, decode)
        assert compared(output, reference, {(1, "post_block"): change})[0] < 1e-4
    (after,) = generate(llm, [PROMPT], [params()])
    assert compared(after, reference, {})[0] < 1e-4


def test_an_engine_that_has_slept_steers_as_before(steered: Any) -> None:
    # CPU memory is kept; `tests/gpu/test_sleep.py` covers GPUs.
    llm, _ = steered
    own = params(steering_vectors={"pre_attn": {0: vector(1)}})
    llm.set_steering({"post_block": {1: vector(2)}})
    try:
        (before,) = generate(llm, [PROMPT], [own])
        for level in (1, 2):
            llm.sleep(level=level)
            with pytest.raises(SteeringValidationError, match="wake it up first"):
                llm.set_steering({"post_block": {1: vector(3)}})
            llm.wake_up()
            (after,) = generate(llm, [PROMPT], [own])
            assert torch.equal(logprobs(before), logprobs(after))
    finally:
        llm.clear_steering()

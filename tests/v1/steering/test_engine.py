# SPDX-License-Identifier: Apache-2.0
"""Steered requests equal transformers with the vectors added by hooks."""

from typing import Any

import pytest
import torch

from tests.v1.steering import _models
from tests.v1.steering._engine import generate, logprobs, params, tokens
from vllm.v1.steering.errors import SteeringValidationError

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

HOOKS = ("pre_attn", "post_attn", "post_block")
PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26, 43]
TIERS = ("steering_vectors", "prefill_steering_vectors", "decode_steering_vectors")


def vector(seed: int, size: float = 1.0) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randn(_models.HIDDEN) * size


def assert_equals_reference(output: Any, reference: Any, changes: Any) -> None:
    ids = PROMPT + tokens(output)
    expected = reference.logprobs(ids[:-1], changes)[len(PROMPT) - 1 :]
    found = logprobs(output)
    error = (found - expected).abs().max() / expected.abs().max()
    assert error < 1e-4, f"relative error {error:.2e}"


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("tier", TIERS)
def test_a_vector_does_what_hooks_do(steered: Any, hook: str, tier: str) -> None:
    llm, reference = steered
    phases: dict[str, Any] = {
        "steering_vectors": lambda added: (added, added),
        "prefill_steering_vectors": lambda added: (added, None),
        "decode_steering_vectors": lambda added: (None, added),
    }
    layers = range(_models.LAYERS)
    specs = [{tier: {hook: {layer: vector(layer)}}} for layer in layers]
    plain, *outputs = generate(
        llm, [PROMPT] * (1 + len(specs)), [params(), *(params(**s) for s in specs)]
    )
    for layer, output in zip(layers, outputs, strict=True):
        change = _models.add_by_phase(len(PROMPT), *phases[tier](vector(layer)))
        assert_equals_reference(output, reference, {(layer, hook): change})
        assert (logprobs(plain) - logprobs(output)).abs().max() > 1e-3


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
        assert_equals_reference(output, reference, {(1, "post_block"): change})
    (after,) = generate(llm, [PROMPT], [params()])
    assert_equals_reference(after, reference, {})


@pytest.mark.parametrize(
    "entry", [[0.0] * _models.HIDDEN, {"vector": [1.0] * _models.HIDDEN, "scale": 0}]
)
def test_nothing_added_changes_no_bit(steered: Any, entry: Any) -> None:
    llm, _ = steered
    zero = {hook: dict.fromkeys(range(_models.LAYERS), entry) for hook in HOOKS}
    (plain,) = generate(llm, [PROMPT], [params()])
    (same,) = generate(llm, [PROMPT], [params(steering_vectors=zero)])
    assert tokens(plain) == tokens(same)
    assert torch.equal(logprobs(plain), logprobs(same))


def test_more_configurations_than_slots_wait_and_come_out_right(steered: Any) -> None:
    llm, reference = steered
    vectors = [vector(seed) for seed in range(13)]
    sampling = [params(5, steering_vectors={"pre_attn": {0: v}}) for v in vectors]
    outputs = generate(llm, [PROMPT] * 13, sampling)
    for output, added in zip(outputs, vectors, strict=True):
        change = _models.add_by_phase(len(PROMPT), added, added)
        assert_equals_reference(output, reference, {(0, "pre_attn"): change})
    assert llm.get_steering()["configs_in_use"] == 0


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

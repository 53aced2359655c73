# SPDX-License-Identifier: Apache-2.0
"""With prefix caching a request equals its cold run, whatever ran before."""

from collections.abc import Iterator
from itertools import takewhile
from typing import Any

import pytest

from tests.v1.steering import _engine, _models
from tests.v1.steering._engine import generate, logprobs, params, tokens
from tests.v1.steering._models import vector

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

BLOCK = 32
PROMPT = [(5 * i + 3) % _models.VOCAB for i in range(3 * BLOCK + 5)]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: Any) -> Iterator[Any]:
    path = _models.save("llama", tmp_path_factory.mktemp("llama"))
    llm = _engine.engine(path, enable_prefix_caching=True, block_size=BLOCK)
    yield llm
    llm.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="module")
def cold_runs(llm: Any) -> dict[str, Any]:
    """Each case without anything in the cache."""
    found = {}
    for case in CASES:
        assert llm.reset_prefix_cache()
        found[case] = run(llm, case)
    return found


@pytest.fixture(autouse=True)
def cold(llm: Any) -> None:
    llm.clear_steering()
    assert llm.reset_prefix_cache()


def spec(seed: int) -> Any:
    return {"post_block": {0: vector(seed)}}


def clamp(**fields: Any) -> Any:
    entry = {"vector": vector(5), "op": "clamp", "max": -1.0, **fields}
    return {"pre_attn": {1: entry}}


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "base": {"steering_vectors": spec(1)},
    "other base": {"steering_vectors": spec(2)},
    "prefill": {"prefill_steering_vectors": spec(1)},
    "decode": {"decode_steering_vectors": spec(1)},
    "clamp": {"steering_vectors": clamp()},
    "clamp decode": {"decode_steering_vectors": clamp()},
    "clamp at 40": {"steering_vectors": clamp(positions=[40])},
    "clamp last": {"steering_vectors": clamp(positions={"last": 2})},
}
STEERS_PROMPT: dict[str, Any] = {
    "plain": ("", "", ""),
    "base": ("v1", "v1", "v1"),
    "other base": ("v2", "v2", "v2"),
    "prefill": ("v1", "v1", "v1"),
    "decode": ("", "", ""),
    "clamp": ("c", "c", "c"),
    "clamp decode": ("", "", ""),
    "clamp at 40": ("", "c", ""),
    "clamp last": ("", "", ""),
}
"""The steering of each full block of the prompt, which decides what is shared."""


def run(llm: Any, case: str, prompt: list[int] = PROMPT, max_tokens: int = 6) -> Any:
    (output,) = generate(llm, [prompt], [params(max_tokens, **CASES[case])])
    return output


def assert_same(one: Any, other: Any) -> None:
    assert tokens(one) == tokens(other)
    assert (logprobs(one) - logprobs(other)).abs().max() < 1e-4


@pytest.mark.parametrize("first", CASES)
@pytest.mark.parametrize("second", CASES)
def test_the_second_equals_its_cold_run(
    llm: Any, cold_runs: dict[str, Any], first: str, second: str
) -> None:
    run(llm, first)
    found = run(llm, second)
    assert_same(found, cold_runs[second])
    pairs = zip(STEERS_PROMPT[first], STEERS_PROMPT[second], strict=True)
    shared = list(takewhile(lambda pair: pair[0] == pair[1], pairs))
    assert found.num_cached_tokens == BLOCK * len(shared)


@pytest.mark.parametrize("case", CASES)
def test_the_next_turn_finds_what_is_steered_alike(llm: Any, case: str) -> None:
    first = run(llm, case, max_tokens=2 * BLOCK)
    follow_up = PROMPT + tokens(first) + [7, 8, 9]
    found = run(llm, case, follow_up)
    assert llm.reset_prefix_cache()
    assert_same(found, run(llm, case, follow_up))
    # The last generated token was never fed back. If prompt and generated tokens are
    # steered differently, only full blocks of the prompt are shared.
    alike = case not in ("prefill", "decode", "clamp decode", "clamp last")
    full = (len(PROMPT) + 2 * BLOCK - 1) // BLOCK * BLOCK
    assert found.num_cached_tokens == (full if alike else 3 * BLOCK)


@pytest.mark.parametrize("field", ["vectors", "prefill_vectors", "decode_vectors"])
def test_a_change_of_the_engines_vectors_leaves_no_stale_block(
    llm: Any, field: str
) -> None:
    plain = run(llm, "plain", max_tokens=2 * BLOCK)
    llm.set_steering(**{field: spec(3)})
    found = run(llm, "plain", max_tokens=2 * BLOCK)
    assert found.num_cached_tokens == (3 * BLOCK if field == "decode_vectors" else 0)
    assert llm.reset_prefix_cache()
    assert_same(found, run(llm, "plain", max_tokens=2 * BLOCK))
    assert (logprobs(found) - logprobs(plain)).abs().max() > 1e-2
    llm.clear_steering()
    assert_same(run(llm, "plain", max_tokens=2 * BLOCK), plain)


@pytest.mark.parametrize("field", ["vectors", "decode_vectors"])
def test_requests_in_flight_at_a_change_leave_no_block_to_others(
    llm: Any, field: str
) -> None:
    engine = llm.llm_engine
    sampling = params(2 * BLOCK + 5)
    engine.add_request("in flight", {"prompt_token_ids": PROMPT}, sampling)
    for _ in range(BLOCK + 3):
        engine.step()
    llm.set_steering(**{field: spec(3)})
    outputs: list[Any] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    mixed = next(o for o in outputs if o.finished)
    follow_up = PROMPT + tokens(mixed) + [7]
    found = run(llm, "plain", follow_up)
    assert llm.reset_prefix_cache()
    assert_same(found, run(llm, "plain", follow_up))

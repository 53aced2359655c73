# SPDX-License-Identifier: Apache-2.0
"""Rows of cached blocks come from the activation store."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import asynchronous
from tests.support.captured import EVERYWHERE, CapturedEngine, asking, prompt

pytestmark = pytest.mark.e2e

TAPS = 9
BLOCK = 32 * TAPS * 64 * 4
"""Bytes of a block at all taps."""


@pytest.fixture(scope="module", params=["sync", "async"])
def storing(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: Any
) -> Iterator[CapturedEngine]:
    """An engine whose store holds 6 blocks in memory and 8 on disk."""
    with asynchronous.allowed():
        engine = CapturedEngine(
            model,
            activation_store_gb=6 * BLOCK / 1e9,
            activation_store_path=str(tmp_path_factory.mktemp("rows")),
            activation_store_disk_gb=8 * BLOCK / 1e9,
            enable_readouts=True,
            max_num_batched_tokens=48,
            num_gpu_blocks_override=24,
            async_scheduling=request.param == "async",
        )
    yield engine
    engine.close()


def run(engine: CapturedEngine, tokens: list[int], *given: Any, **more: Any) -> Any:
    (output,) = engine.run([tokens], asking(*given, **{"max_tokens": 2, **more}))
    return output


def cached(output: Any) -> int:
    rows: int = output.capture_results["keeper"].cached_rows
    return rows


def test_rows_of_a_repeated_prompt_are_not_computed_again(
    storing: CapturedEngine,
) -> None:
    first, second = (run(storing, prompt(100, 500)) for _ in range(2))
    assert (first.num_cached_tokens, cached(first)) == (0, 0)
    assert (second.num_cached_tokens, cached(second)) == (96, 96 * TAPS)
    storing.check(first)
    storing.check(second)


def test_of_a_longer_prompt_the_beginning_is_stored(storing: CapturedEngine) -> None:
    run(storing, prompt(70, 501))
    longer = run(storing, prompt(70, 501) + prompt(50, 502))
    assert cached(longer) == 64 * TAPS
    storing.check(longer)
    again = run(storing, prompt(70, 501) + prompt(50, 502), [3, 40, 99])
    assert again.num_cached_tokens == 96 and cached(again) == 2 * TAPS
    storing.check(again, [3, 40, 99])


def test_some_of_the_stored_hook_points_are_read_and_others_computed(
    storing: CapturedEngine,
) -> None:
    tokens = prompt(80, 503)
    run(storing, tokens, "all", {"post_block": "all", "pre_attn": [0]})
    some = run(storing, tokens, "all", {"post_block": [2, 0]})
    assert cached(some) == 64 * 2
    storing.check(some)
    other = run(storing, tokens, "all", {"post_block": "all", "pre_attn": [1]})
    assert cached(other) == 0 == other.num_cached_tokens
    storing.check(other)


def test_rows_that_are_not_used_wait_on_disk_until_they_are_dropped(
    storing: CapturedEngine,
) -> None:
    prompts = [prompt(98, 520 + number) for number in range(5)]
    for tokens in prompts:  # 15 blocks; memory has 6, disk 8
        run(storing, tokens)
    # Of the first one, the last block has been used last, so it was dropped first.
    assert [cached(run(storing, prompts[n])) // TAPS for n in (1, 0)] == [96, 64]


def test_a_request_may_bypass_the_store(storing: CapturedEngine) -> None:
    tokens = prompt(80, 504)
    for _ in range(2):
        output = run(storing, tokens, capture_cache=False)
        assert cached(output) == 0 == output.num_cached_tokens
    assert cached(run(storing, tokens)) == 0, "it has stored nothing either"


def test_what_resets_the_prefix_cache_empties_the_store(
    storing: CapturedEngine,
) -> None:
    tokens = prompt(100, 509)
    run(storing, tokens)
    assert storing.llm.reset_prefix_cache()
    run(storing, tokens, capture_cache=False)
    output = run(storing, tokens)
    assert cached(output) == 0
    assert cached(run(storing, tokens)) == 96 * TAPS
    storing.check(output)


def test_what_readouts_read_is_computed(storing: CapturedEngine) -> None:
    tokens = prompt(100, 505)
    run(storing, tokens)
    norm = {"kind": "norm", "hooks": {"post_block": "all"}, "positions": [50, 99]}
    output = run(storing, tokens, readouts={"norm": norm})
    assert output.num_cached_tokens == 32 and cached(output) == 32 * TAPS
    assert output.readouts["norm"].positions == [50, 99]
    storing.check(output)


def test_rows_that_wait_for_a_rule_are_computed(storing: CapturedEngine) -> None:
    tokens = prompt(70, 506)
    norm = {"kind": "norm", "hooks": {"post_block": [0]}, "positions": "last_prompt"}
    rule = {"readout": "norm", "above": 0.0}
    spec = {"hooks": EVERYWHERE, "positions": "all", "keep_when": rule}
    for _ in range(2):
        more = {"capture": {"keeper": spec}, "readouts": {"norm": norm}}
        output = run(storing, tokens, **more)
        assert output.num_cached_tokens == 0
        storing.check(output)


@pytest.fixture(scope="module")
def steered(model: Path) -> Iterator[CapturedEngine]:
    """An engine with steering, which computes 48 tokens in a step."""
    engine = CapturedEngine(
        model,
        activation_store_gb=1e-3,
        enable_steering=True,
        max_num_seqs=2,
        max_num_batched_tokens=48,
        async_scheduling=False,
    )
    yield engine
    engine.close()


VECTOR = {"post_attn": {1: [0.5] * 64}}


def test_steered_blocks_have_rows_of_their_own(steered: CapturedEngine) -> None:
    engine = steered
    tokens = prompt(80, 507)
    plain = run(engine, tokens)
    pushed = [run(engine, tokens, prefill_steering_vectors=VECTOR) for _ in range(2)]
    assert [cached(one) for one in pushed] == [0, 64 * TAPS]
    again = run(engine, tokens)
    assert cached(again) == 64 * TAPS
    first, second, own = (engine.rows(one) for one in (*pushed, plain))
    tap = 2, "post_block"
    assert (first[tap] - second[tap]).abs().max() < 1e-4
    assert (first[tap][:80] - own[tap][:80]).abs().max() > 1e-2
    engine.check(again)


def begin(engine: CapturedEngine, tokens: list[int]) -> None:
    """Compute the first tokens of a prompt, and then begin to steer.

    If no other request was running, each change would reset the prefix cache.
    """
    for name, given, most in (("other", [1], 90), ("a", tokens, 2)):
        params = asking(max_tokens=most)
        engine.llm.llm_engine.add_request(name, {"prompt_token_ids": given}, params)
    engine.llm.llm_engine.step()
    engine.llm.set_steering(VECTOR)


def complete(engine: CapturedEngine) -> None:
    step = engine.llm.llm_engine.step
    while not any(one.request_id == "a" and one.finished for one in step()):
        pass


def test_rows_computed_after_a_change_of_vectors_are_not_those_of_before(
    steered: CapturedEngine,
) -> None:
    tokens = prompt(100, 508)
    begin(steered, tokens)
    complete(steered)
    steered.llm.clear_steering()
    steered.llm.llm_engine.abort_request(["other"])
    run(steered, tokens, capture_cache=False)  # Its keys and values are cached.
    output = run(steered, tokens)
    assert cached(output) == 32 * TAPS, "of before the change"
    steered.check(output)


def test_rows_computed_before_a_change_of_vectors_are_not_those_of_after(
    steered: CapturedEngine,
) -> None:
    tokens = prompt(100, 511)
    begin(steered, tokens)
    assert steered.llm.reset_prefix_cache(reset_running_requests=True)
    complete(steered)
    steered.llm.llm_engine.abort_request(["other"])
    stored, own = run(steered, tokens), run(steered, tokens, capture_cache=False)
    steered.llm.clear_steering()
    assert (cached(stored), cached(own)) == (96 * TAPS, 0)
    expected = steered.rows(own)
    for tap, rows in steered.rows(stored).items():
        assert (rows - expected[tap]).abs().max() < 1e-4, tap


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.timeout(300)
def test_any_requests_with_common_beginnings(
    storing: CapturedEngine, seed: int
) -> None:
    """With preemptions: 24 blocks of keys and values for up to 8 requests."""
    draw = random.Random(seed)
    stems = [
        prompt(length, 600 + 10 * seed + n) for n, length in enumerate((40, 70, 100))
    ]
    hooks = [None, {"post_block": "all"}, {"post_block": [1], "pre_attn": [2]}]
    positions: list[Any] = ["all", "all_prompt", [5, 33, 41, -1], {"last": 40}]
    got = 0
    for number in range(8):
        asked = [
            (
                stem[: draw.randint(1, len(stem))] * draw.choice((0, 1))
                + stem
                + prompt(draw.randint(2, 40), draw.randrange(3)),
                asking(
                    draw.choice(positions),
                    draw.choice(hooks),
                    max_tokens=draw.randint(1, 12),
                    capture_cache=draw.random() < 0.9,
                ),
            )
            for stem in draw.choices(stems, k=draw.randint(1, 7))
        ]
        outputs = storing.run(
            [tokens for tokens, _ in asked], [how for _, how in asked]
        )
        for output, (tokens, how) in zip(outputs, asked, strict=True):
            assert output.capture_results is not None
            result = output.capture_results["keeper"]
            assert result.status == "ok", (number, result.error)
            spec = how.capture["keeper"]["positions"]
            stop = len(tokens) + len(output.outputs[0].token_ids) - 1
            wanted = {
                "all": range(stop),
                "all_prompt": range(len(tokens)),
            }.get(spec if isinstance(spec, str) else "")
            if isinstance(spec, list):
                wanted = [p for p in (5, 33, 41, len(tokens) - 1) if p < stop]
                wanted = sorted(set(wanted))
            elif isinstance(spec, dict):
                wanted = range(max(len(tokens) - 40, 0), len(tokens))
            storing.check(output, list(wanted))
            got += result.cached_rows
    assert got > 0

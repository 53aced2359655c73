# SPDX-License-Identifier: Apache-2.0
"""Sweeps of a small network equal a loop that changes one row after another."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.patching._toy import HOOKS, LAYERS, VOCABULARY, Toy
from vllm.patching.alignment import align
from vllm.patching.questions import Reply
from vllm.patching.study import Study
from vllm.v1.steering.errors import SteeringValidationError

TOKENS = st.integers(0, 3)
PROMPTS = st.lists(TOKENS, min_size=1, max_size=6)
CLEAN, CORRUPT = [1, 2, 3, 4, 5], [1, 2, 6, 4, 5]
ANSWERS = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=3)


def logprob(toy: Toy, prompt: list[int], answer: list[int], steering: Any) -> float:
    """Of an answer of several tokens, each predicted from those before it."""
    return sum(
        toy.run(prompt + answer[:n], steering)[1][token]
        for n, token in enumerate(answer)
    )


def patched(toy: Toy, layer: int, hook: str, position: int, row: Any) -> Any:
    return {hook: {layer: [{"vector": row, "positions": [position]}]}}


@given(
    source=PROMPTS,
    target=PROMPTS,
    answer=ANSWERS,
    foil=ANSWERS,
    metric=st.sampled_from(["logprob", "logit_diff"]),
    effect=st.sampled_from(["denoise", "noise"]),
    seed=st.integers(0, 3),
)
def test_a_sweep_equals_a_loop_over_its_cells(
    source: list[int],
    target: list[int],
    answer: list[int],
    foil: list[int],
    metric: str,
    effect: str,
    seed: int,
) -> None:
    toy, alignment = Toy(seed), align(source, target)
    if answer == foil or all(
        alignment.source_of(p) is None for p in range(len(target))
    ):
        return
    study = toy.sweep(
        prompt=target,
        other=source,
        hooks=HOOKS,
        answer=answer,
        foil=foil,
        metric=metric,
        effect=effect,
    )

    def value(prompt: list[int], steering: Any = None) -> float:
        found = logprob(toy, prompt, answer, steering)
        if metric == "logit_diff":
            found -= logprob(toy, prompt, foil, steering)
        return found

    result = study.result
    pair = result.clean, result.corrupt
    assert (pair if effect == "denoise" else pair[::-1]) == pytest.approx(
        (value(source), value(target))
    )
    rows, _ = toy.run(source)
    for hook in HOOKS:
        for layer in range(LAYERS):
            for position in range(len(target)):
                found = float(result.values[hook][layer, position])
                other = alignment.source_of(position)
                if other is None:
                    assert math.isnan(found)
                    continue
                row = rows[layer, hook][other]
                steering = patched(toy, layer, hook, position, row)
                assert found == pytest.approx(value(target, steering), abs=1e-5)
    assert result.noise_floor < 1e-9
    skipped = [p for p in range(len(target)) if alignment.source_of(p) is None]
    assert len(result.skipped) == len(HOOKS) * LAYERS * len(skipped)


def test_cells_that_change_nothing_are_not_run() -> None:
    toy = Toy()
    study = toy.sweep(prompt=CORRUPT, other=CLEAN, hooks=HOOKS, answer=7, foil=8)
    # Two equal tokens come first; in the last layer, only the last token's counts.
    assert len(study.filled) == 2 * LAYERS * len(HOOKS) + 2 * 2
    checks = 1 + 3
    assert len(study.asks) == 5 * LAYERS * len(HOOKS) - len(study.filled) + checks
    assert len(toy.asked) == len(study.asks) + 3


def test_what_is_recovered_is_a_share_of_the_way() -> None:
    plain = Toy().sweep(prompt=CORRUPT, other=CLEAN, answer=7, foil=8).result
    study = Toy().sweep(
        prompt=CORRUPT, other=CLEAN, answer=7, foil=8, metric="recovered"
    )
    result = study.result
    assert (result.clean, result.corrupt) == (plain.clean, plain.corrupt)
    way = plain.clean - plain.corrupt
    expected = (plain.values["post_block"] - plain.corrupt) / way
    assert np.allclose(result.values["post_block"], expected, atol=1e-5)
    assert result.values["post_block"][-1, -1] == pytest.approx(1.0)
    assert result.baseline == 0.0 and result.metric == "recovered"


def test_nothing_is_recovered_where_both_runs_agree() -> None:
    with pytest.raises(SteeringValidationError, match="nothing is there to recover"):
        Toy().sweep(prompt=CLEAN, other=CLEAN, answer=7, metric="recovered")


@pytest.mark.parametrize("effect", ["denoise", "noise"])
def test_the_divergence_is_from_the_clean_run(effect: str) -> None:
    toy = Toy()
    prompts = (CORRUPT, CLEAN) if effect == "denoise" else (CLEAN, CORRUPT)
    result = toy.sweep(
        prompt=prompts[0], other=prompts[1], metric="kl", effect=effect
    ).result
    p, q = toy.run(CLEAN)[1], toy.run(CORRUPT)[1]
    top = np.argsort(-p)[:5]
    rest = [1 - np.exp(one[top]).sum() for one in (p, q)]
    expected = (np.exp(p[top]) * (p[top] - q[top])).sum()
    expected += rest[0] * np.log(rest[0] / rest[1])
    assert result.clean == pytest.approx(0.0, abs=1e-9)
    assert result.corrupt == pytest.approx(expected)
    assert (np.exp(p) * (p - q)).sum() >= expected > 0  # No more than the whole.


def test_means_and_noise_are_of_the_prompts_own_rows() -> None:
    toy = Toy()
    rows = toy.run(CLEAN)[0][1, "post_attn"]
    asked: dict[str, Any] = {"hooks": "post_attn", "answer": 7, "metric": "logprob"}
    mean = toy.sweep(prompt=CLEAN, source="mean", **asked).result
    for position in range(5):
        steering = patched(toy, 1, "post_attn", position, rows.mean(axis=0))
        found = mean.values["post_attn"][1, position]
        assert found == pytest.approx(toy.run(CLEAN, steering)[1][7], abs=1e-5)

    def noised(seed: int) -> Any:
        one = toy.sweep(prompt=CLEAN, source="noise", seed=seed, **asked).result
        return one.values["post_attn"]

    assert np.array_equal(noised(0), noised(0))
    assert not np.allclose(noised(0)[:-1], noised(1)[:-1])


def test_positions_of_a_group_are_patched_together() -> None:
    toy = Toy()
    result = toy.sweep(
        prompt=CORRUPT, other=CLEAN, answer=7, foil=8, positions=[[0, 1, 2, 3, 4]]
    ).result
    values = result.values["post_block"]
    assert values.shape == (LAYERS, 1)
    assert np.allclose(values, result.clean, atol=1e-5)


def test_a_request_that_fails_is_a_cell_without_value() -> None:
    toy = Toy()
    whole = toy.sweep(prompt=CORRUPT, other=CLEAN, answer=7, foil=8)
    study = Study(whole.plan)
    for asks in study.rounds():
        study.replies = [toy.answer(ask) for ask in asks]
    done = list(study.take(0, ValueError("the run was dropped")))
    assert [one.error for one in done] == ["the run was dropped"]
    assert math.isnan(done[0].value)
    assert study.result.skipped[0].reason == "the run was dropped"
    (done,) = study.take(1, Reply({7: -1.0, 8: -3.0}))
    assert done.value == pytest.approx(2.0)
    assert study.result.values["post_block"][done.cell.place] == pytest.approx(2.0)

# SPDX-License-Identifier: Apache-2.0
"""`vllm steer eval`: its numbers, controls and verdicts."""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.client._answering import served
from vllm.steering.evaluation.candidates import KINDS, candidates
from vllm.steering.evaluation.curves import draw_points, points_table
from vllm.steering.evaluation.evaluate import Point, evaluate, verdicts
from vllm.steering.evaluation.judge import RemoteJudge
from vllm.steering.measures import (
    auroc,
    divergence,
    repetition,
    standard_error,
)
from vllm.steering.pairs import Pair
from vllm.steering.sweep import Generated
from vllm.steering.vectors import VectorSet, load_vectors
from vllm.v1.steering.errors import SteeringValidationError

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples/demo_model"))  # the examples are scripts

from generate_text import documents, neutral_openings  # noqa: E402


def test_auroc_counts_pairs_in_order_and_ties_half() -> None:
    chance = np.random.default_rng(0)
    positive, negative = (
        chance.integers(0, 9, 30) + 2.0,
        chance.integers(0, 9, 20) + 0.0,
    )
    brute = np.mean(
        [(p > n) + 0.5 * (p == n) for p in positive for n in negative], dtype=float
    )
    assert auroc(positive, negative) == pytest.approx(brute)
    assert auroc(np.ones(3), np.zeros(2)) == 1.0


def test_divergence_is_kullback_and_leiblers() -> None:
    p, q = np.array([0.5, 0.25, 0.25, 0.0]), np.array([0.25, 0.5, 0.125, 0.125])
    with np.errstate(divide="ignore"):
        found = divergence(np.log(p), np.log(q))
    wanted = sum(a * np.log(a / b) for a, b in zip(p, q) if a)
    assert found == pytest.approx(wanted) and divergence(np.log(q), np.log(q)) == 0


def test_small_measures() -> None:
    assert repetition([1, 2, 3, 1, 2, 3]) == pytest.approx(0.25)
    assert repetition([1]) == 0
    assert standard_error([1.0, 3.0]) == pytest.approx(1.0)


def test_controls_have_the_vectors_place_and_dose() -> None:
    chance = np.random.default_rng(1)
    positive, negative = chance.normal(size=(2, 12, 6))
    positive += 1
    vector = (positive - negative).mean(axis=0).astype(np.float32)
    found = candidates((2, "post_block"), vector, positive, negative, seed=0)
    assert [one.kind for one in found] == list(KINDS)
    norm = np.linalg.norm(np.concatenate([positive, negative]), axis=1).mean()
    for one in found:
        assert np.linalg.norm(one.vector(0.3)) == pytest.approx(0.3 * norm, rel=1e-5)
    assert found[0].auroc > 0.8
    again = candidates((2, "post_block"), vector, positive, negative, seed=0)
    assert np.array_equal(found[1].unit, again[1].unit)


@pytest.fixture(scope="module")
def pairs() -> list[Pair]:
    """Pairs of stories with one opening and an end in each tone."""
    ends: dict[str, list[str]] = {"cheerful": [], "gloomy": []}
    for document in islice(documents(seed=77), 60):
        ends[document.tone].append(document.text.removeprefix(document.opening))
    openings = neutral_openings(12, seed=5)
    return [
        Pair(opening + cheerful, opening + gloomy)
        for opening, cheerful, gloomy in zip(openings, ends["cheerful"], ends["gloomy"])
    ]


DOSES = [0.1, 0.3]


@pytest.mark.e2e
@pytest.mark.slow
def test_the_examples_vector_is_ranked_above_its_controls_and_noise_is_not(
    demo_llm: Any, pairs: list[Pair], tmp_path: Path
) -> None:
    tone = load_vectors(ROOT / "examples/steering/tone.safetensors")
    noise = np.random.default_rng(9).normal(size=tone.width).astype(np.float32)
    both = VectorSet({**tone.vectors, (4, "post_block"): noise}, tone.provenance)
    harmless = neutral_openings(4, seed=6)
    points = evaluate(demo_llm, both, pairs, harmless, DOSES, max_tokens=16)
    assert len(points) == 2 * len(KINDS) * len(DOSES)
    for point in points:
        assert point.kl >= 0 and point.perplexity >= 1 and 0 <= point.right_sign <= 1
    here = {(p.layer, p.kind, p.dose): p for p in points}
    tones = [here[2, "vector", dose] for dose in DOSES]
    assert 0 < tones[0].effect < tones[1].effect and tones[1].right_sign > 0.8
    assert tones[0].auroc > 0.9 and tones[0].kl < tones[1].kl
    for kind in KINDS[1:]:
        assert abs(here[2, kind, 0.3].effect) < tones[1].effect / 2
    found = verdicts(points, kl_limit=10.0)
    told = points_table(points)
    assert [(one.layer, one.works) for one in found] == [(2, True), (4, False)], told
    assert found[0].best_dose == 0.3 and "works" in found[0].sentence(10.0)
    assert "does nothing that its controls do not" in found[1].sentence(10.0)
    (none, _) = verdicts(points, kl_limit=1e-12)
    assert none.best_dose is None and "no dose" in none.sentence(1e-12)
    draw_points(tmp_path / "eval.png", points, 0.1)
    assert (tmp_path / "eval.png").read_bytes()[:4] == b"\x89PNG"
    assert len(points_table(points).splitlines()) == 1 + len(points)
    json.dumps([point.as_json() for point in points], allow_nan=False)


@pytest.mark.e2e
@pytest.mark.slow
def test_a_vector_that_is_turned_around_works_the_other_way_and_is_judged(
    demo_llm: Any, pairs: list[Pair], judge: Any
) -> None:
    rate, asked = judge
    tone = load_vectors(ROOT / "examples/steering/tone.safetensors")
    turned = replace(tone, vectors={tap: -v for tap, v in tone.vectors.items()})
    openings = neutral_openings(2, seed=6)
    points = evaluate(demo_llm, turned, pairs, openings, [0.3], 4, judge=rate)
    (point,) = [point for point in points if point.kind == "vector"]
    assert point.effect < 0 and point.right_sign < 0.2 and point.auroc < 0.1
    assert not verdicts(points, kl_limit=10.0)[0].works
    # Three questions about each answer under each candidate.
    assert len(asked) == 3 * len(openings) * len(KINDS)
    assert all(one.judged == pytest.approx(1.5) for one in points)
    assert "judged" in points_table(points).splitlines()[0]


def point(**changes: Any) -> Point:
    told: dict[str, Any] = {"layer": 1, "hook": "post_block", "kind": "vector"}
    told |= {"dose": 0.1, "auroc": 0.9, "effect": 1.0, "effect_error": 0.1}
    told |= {"right_sign": 1.0, "kl": 0.01, "perplexity": 5.0, "repetition": 0.0}
    told |= {"early_ends": 0.0} | changes
    spread = told["effect_error"] * np.array([-1.0, 1.0, -1.0, 1.0])
    return Point(**told, changes=tuple((told["effect"] + spread).tolist()))


def test_the_dose_to_take_is_the_largest_below_the_limit() -> None:
    doses = [point(dose=d, kl=k) for d, k in ((0.1, 0.01), (0.2, 0.09), (0.4, 0.5))]
    controls = [
        point(kind="random", dose=p.dose, effect=0.2, effect_error=0.1) for p in doses
    ]
    (found,) = verdicts([*doses, *controls], kl_limit=0.1)
    assert found.best_dose == 0.2 and found.works
    equal = [replace(c, changes=doses[0].changes) for c in controls]
    assert not verdicts([*doses, *equal], kl_limit=0.1)[0].works


@pytest.fixture
def judge() -> Iterator[Any]:
    """A server that gives ratings from a table."""
    asked: list[str] = []
    ratings = {"Concept:": "Rating: 2", "instruction asks": "So, rating: 1."}

    def answer(request: httpx.Request) -> httpx.Response:
        content = json.loads(request.content)["messages"][0]["content"]
        asked.append(content)
        text = next((r for m, r in ratings.items() if m in content), "Rating: 2")
        if "mute" in content:
            text = "I would rather not."
        told = {"choices": [{"message": {"content": text}}]}
        return httpx.Response(200, json=told)

    with served(answer) as url:
        yield RemoteJudge(url, "m", "joy"), asked


def test_a_judge_is_asked_three_questions_and_the_harmonic_mean_taken(
    judge: Any,
) -> None:
    rate, asked = judge
    answer = Generated("Tell me a story.", "Anna laughed.", [1], [2], True)
    assert rate([answer]) == pytest.approx(3 / (1 / 2 + 1 + 1 / 2))
    assert len(asked) == 3 and all("Anna laughed." in text for text in asked)
    assert "joy" in asked[0] and "Tell me a story." in asked[1]
    with pytest.raises(SteeringValidationError, match="no rating"):
        rate([replace(answer, text="mute")])
    away = replace(rate, url="http://127.0.0.1:9")
    with pytest.raises(SteeringValidationError, match="does not answer"):
        away([answer])

# SPDX-License-Identifier: Apache-2.0
"""The steering examples, on one engine; `test_http.py` runs the client's."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.scripts import load
from tests.v1.steering import _engine  # noqa: F401 - sets the environment
from vllm.steering.vectors import load_vectors
from vllm.v1.residual.model_identity import identity_of_path
from vllm.v1.steering.spec.provenance import Source

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "steering"
TONE = FOLDER / "tone.safetensors"
sys.path.insert(0, str(FOLDER))  # the examples are scripts

import small_sae  # noqa: E402


def test_the_vector_belongs_to_the_demo_model() -> None:
    vectors = load_vectors(TONE)
    demo = identity_of_path(str(ROOT / "examples/demo_model/weights"))
    vectors.provenance.check_model(demo, Source(str(TONE)))
    assert vectors.provenance.weights == demo.weights
    assert vectors.taps == [(2, "post_block")]


@pytest.fixture
def run(demo_llm: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Any:
    """Run an example on the shared engine; returns its output."""

    def call(name: str, *arguments: Any) -> str:
        script = load(FOLDER, name)
        asked: list[dict[str, Any]] = []

        def shared(**options: Any) -> Any:
            asked.append(options)
            return demo_llm

        monkeypatch.setattr(script, "small_engine", shared)
        script.main(*arguments)
        assert len(asked) == 1
        printed: str = capsys.readouterr().out
        return printed

    return call


@pytest.mark.e2e
@pytest.mark.slow
def test_offline_steering_says_other_things_and_takes_it_back(run: Any) -> None:
    lines = run("offline").splitlines()
    found = {
        line[2:24].strip(): line[24:].strip() for line in lines if line[:2] == "  "
    }
    assert len(found) == 8
    assert found["by name"] == found["cheerful"]
    assert found["by name, less twice"] == found["gloomy"] == found["everything gloomy"]
    assert found["gloomy"] not in (found["unsteered"], found["cheerful"])
    assert found["without any tone"] != found["gloomy"]


@pytest.mark.e2e
@pytest.mark.slow
def test_a_mixed_batch_leaves_the_unsteered_alone(run: Any) -> None:
    printed = run("mixed_batch")
    assert "equals its text alone: True" in printed
    tones = [float(line.split()[3]) for line in printed.splitlines() if "tone" in line]
    assert len(tones) == 5 and tones[0] < 0 < tones[-1] and tones == sorted(tones)


@pytest.mark.e2e
@pytest.mark.slow
def test_ablating_and_rotating_change_the_text(run: Any) -> None:
    plain, ablated = (line[12:] for line in run("ablate").splitlines()[-2:])
    assert plain and ablated and plain != ablated
    turned = [line.partition(": ")[2] for line in run("rotate").splitlines()[-4:]]
    assert all(turned) and len(set(turned)) > 1


@pytest.mark.e2e
@pytest.mark.slow
def test_a_condition_leaves_cheerful_stories_alone(run: Any) -> None:
    stories = [line[27:] for line in run("conditional").splitlines()]
    assert len(stories) == 4
    assert stories[0] != stories[1] and stories[2] == stories[3]


@pytest.mark.e2e
@pytest.mark.slow
def test_a_feature_of_an_sae_trained_here_decides_the_tone(
    run: Any, demo_llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_sae, "train", partial(small_sae.train, steps=150))
    printed = run("clamp_feature").splitlines()
    demo_llm.unregister_readout_module("small")
    assert float(printed[0].split()[1].rstrip(";")) > 0.8
    plain, without, _ = (line[19:] for line in printed[1:])
    assert "blue" in plain and "blue" not in without


@pytest.mark.e2e
@pytest.mark.slow
def test_extracting_makes_the_vector_in_the_same_folder(
    run: Any, tmp_path: Path
) -> None:
    path = tmp_path / "tone.safetensors"
    printed = run("extract_and_steer", ["--out", str(path)])
    assert "unsteered" in printed and "times -1" in printed
    made, kept = load_vectors(path), load_vectors(TONE)
    tap = (2, "post_block")
    cosine = made.vectors[tap] @ kept.vectors[tap] / made.norm(tap) / kept.norm(tap)
    assert cosine > 0.999 and made.provenance.weights == kept.provenance.weights

# SPDX-License-Identifier: Apache-2.0
"""`vllm steer` on the demo model: its commands share one engine."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.entrypoints.cli.conftest import DEMO, run_command
from vllm.entrypoints.cli.engine_command import join_numbers
from vllm.entrypoints.cli.steer.options import (
    parse_hook,
    parse_layers,
    parse_scales,
    resolve_address,
)
from vllm.steering.convert import read_vectors
from vllm.steering.vectors import vector_set
from vllm.v1.steering.errors import SteeringValidationError
from vllm.v1.steering.spec.provenance import Provenance

ROOT = Path(__file__).parents[3]
CHEERFUL = "The sun shone, and everybody laughed. It was a wonderful day."
GLOOMY = "The rain fell, and everybody wept. It was a dreadful day."
PLACES = ["Anna went home.", "Max came to the harbour.", "Ben sat in the garden."]
PROMPT = "Anna went to the garden after lunch."


def run(monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    """Run `vllm steer WORDS` in this process."""
    run_command(monkeypatch, "steer", *words)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    lines = [
        {"positive": f"{place} {CHEERFUL}", "negative": f"{place} {GLOOMY}"}
        for place in PLACES
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.usefixtures("started")
class TestOnAnEngine:
    def test_a_vector_is_extracted_and_does_what_it_says(
        self,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        tmp_path: Path,
        pairs: Path,
        started: list[Any],
    ) -> None:
        file = tmp_path / "tone.safetensors"
        model = ("--model", DEMO)
        options = ("--pairs", pairs, "--out", file, "--position", "mean")
        run(monkeypatch, "extract", *model, *options)
        assert started[0].enable_readouts and started[0].enforce_eager
        assert capsys.readouterr().out.count("100%") >= 5, "pairs are in order"
        found = read_vectors(file)
        assert found.taps == [(layer, "post_block") for layer in range(6)]
        assert found.provenance.num_layers == 6 and found.provenance.weights
        assert "mean of 3 pairs, mean token" in found.provenance.origin

        options = ("--vectors", file, "--prompt", PROMPT, "--layers", "2")
        run(monkeypatch, "apply", *model, *options, "--scales", "-1,1")
        assert started[1].enable_steering and started[1].max_steering_configs == 16
        head, *lines = capsys.readouterr().out.strip().splitlines()
        assert head == PROMPT
        columns = [" ".join(part) for part in zip(*(_split(x) for x in lines))]
        assert [column.split("--")[0].strip() for column in columns] == [
            "unsteered",
            "times -1",
            "times +1",
        ]
        assert len(set(columns)) == 3

        numbers, plot = tmp_path / "sweep.json", tmp_path / "sweep.png"
        score = f"{ROOT / 'examples/demo_model/tone.py'}:tone_score"
        options = ("--vectors", file, "--prompt", PROMPT, "--layers", "2,3")
        options = (*options, "--scales", "-1,0,1", "--score", score, "--json", numbers)
        run(monkeypatch, "sweep", *model, *options, "--plot", plot)
        out = capsys.readouterr().out
        assert "mean tone_score:" in out and "perplexity" in out
        cells = json.loads(numbers.read_text())
        scores = {(one["layer"], one["scale"]): one["score"] for one in cells}
        for layer in (2, 3):
            row = [scores[layer, scale] for scale in (-1, 0, 1)]
            assert row == sorted(row) and row[0] < 0 < row[2]
        assert all(1 < one["perplexity"] < 50 for one in cells)
        assert plot.read_bytes().startswith(b"\x89PNG")

    def test_chats_are_extracted_from_and_steered(
        self, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
    ) -> None:
        def chat(text: str) -> list[dict[str, str]]:
            return [
                {"role": "user", "content": "How was the day?"},
                {"role": "assistant", "content": text},
                {"role": "user", "content": "And then?"},
            ]

        path, file = tmp_path / "pairs.json", tmp_path / "tone.safetensors"
        pair = {"positive": chat(CHEERFUL), "negative": chat(GLOOMY)}
        path.write_text(json.dumps([pair]))
        options = ("--pairs", path, "--out", file, "--method", "pca")
        options = (*options, "--layers", "1,3", "--hook", "pre_attn")
        run(monkeypatch, "extract", "--model", DEMO, *options)
        assert read_vectors(file).taps == [(1, "pre_attn"), (3, "pre_attn")]
        options = ("--vectors", file, "--prompt", "How was the weather?", "--chat")
        run(monkeypatch, "apply", "--model", DEMO, *options)
        assert "How was the weather?\nunsteered" in capsys.readouterr().out


def _split(line: str) -> list[str]:
    return [*line.split("|"), "", ""][:3]


def test_conversion_says_what_it_wrote(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    source, target = tmp_path / "v.safetensors", tmp_path / "v.gguf"
    said = Provenance(model="m", origin="was edited")
    vector_set({(3, "post_block"): [3.0, 4.0], (5, "post_block"): [1, 0]}, said).save(
        source
    )
    options = ("--layers", "3", "--unit", "--scale", "-2", "--gguf-writer", "llama.cpp")
    run(monkeypatch, "convert", source, target, *options)
    assert "3  post_block  2" in capsys.readouterr().out
    found = read_vectors(target)
    assert found.taps == [(3, "post_block")]
    assert np.allclose(found.vectors[3, "post_block"], [-1.2, -1.6])
    run(monkeypatch, "show", target)
    assert "form of llama.cpp, layers as applied" in capsys.readouterr().out


SWEEP = ["sweep", "--model", "m", "--vectors", "v.pt"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["show", "missing.gguf"], "vllm steer show: .*no file"),
        (["apply", "--vectors", "v.pt"], "--prompt TEXT"),
        (["extract", "--pairs", "p", "--out", "v.safetensors"], "cannot be read"),
        ([*SWEEP, "--prompt", "a", "--score", "x"], "FILE.py:FUN"),
        ([*SWEEP, "--prompt", "a", "--samples", "2"], "2 per prompt.*--temperature"),
    ],
)
def test_mistakes_are_reported_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    with pytest.raises(SystemExit, match=said):
        run(monkeypatch, *words)


def test_a_part_of_a_judge_is_refused(
    monkeypatch: pytest.MonkeyPatch, pairs: Path, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("Go.")
    files = ("--vectors", "v.pt", "--pairs", pairs, "--harmless", tmp_path / "a.txt")
    for words in (("--concept", "joy"), ("--judge", "http://x", "--judge-model", "m")):
        with pytest.raises(SystemExit, match="judge: give --judge URL"):
            run(monkeypatch, "eval", "--model", "m", *files, *words)


def test_a_model_must_be_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "v.safetensors"
    vector_set({(1, "post_block"): np.ones(4)}).save(file)
    with pytest.raises(SystemExit, match="--model"):
        run(monkeypatch, "apply", "--vectors", file, "--prompt", "a")


def test_scores_are_functions_of_files(tmp_path: Path) -> None:
    from vllm.steering.sweep import load_score

    (tmp_path / "s.py").write_text("def length(text): return len(text)")
    assert load_score(f"{tmp_path}/s.py:length")("four") == 4.0
    with pytest.raises(SteeringValidationError, match="no function"):
        load_score(f"{tmp_path}/s.py:width")


def test_layers_and_scales_are_lists() -> None:
    assert parse_layers("all") is None
    assert parse_layers("2,4-6,5") == [2, 4, 5, 6]
    assert parse_scales("-1,0.5") == [-1.0, 0.5]
    from argparse import ArgumentTypeError

    for layers in ("", "a", "3-1", "-1", "1-"):
        with pytest.raises(ArgumentTypeError):
            parse_layers(layers)
    for scales in ("", "a", "1,,2", "nan", "inf"):
        with pytest.raises(ArgumentTypeError):
            parse_scales(scales)


def test_a_hook_may_be_an_address() -> None:
    from argparse import ArgumentTypeError, Namespace

    assert parse_hook("hook_resid_mid") == "post_attn"
    args = Namespace(hook=parse_hook("resid_post.3"), layers=None)
    resolve_address(args)
    assert (args.hook, args.layers) == ("post_block", [3])
    with pytest.raises(SteeringValidationError, match="leave out --layers"):
        resolve_address(Namespace(hook="resid_post.3", layers=[3]))
    with pytest.raises(ArgumentTypeError, match="post_block"):
        parse_hook("nowhere")


def test_negative_numbers_are_no_options() -> None:
    words = ["steer", "--scales", "-0.5,1", "--seed", "-1"]
    assert join_numbers(words) == ["steer", "--scales=-0.5,1", "--seed", "-1"]


def test_a_command_is_one_of_the_installed_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("VLLM_LOGGING_LEVEL", "PYTHONWARNINGS"):
        monkeypatch.delenv(name)  # Tests ask for upstream's log, users do not.
    file = tmp_path / "v.safetensors"
    vector_set({(3, "post_block"): [3.0, 4.0]}).save(file)
    command = [sys.executable, Path(sys.executable).with_name("vllm"), "steer", "show"]
    done = subprocess.run([*command, file], capture_output=True, text=True, check=True)
    assert "3  post_block  5\n" in done.stdout and "hidden_size: 2" in done.stdout
    assert not done.stderr, "no library warns"

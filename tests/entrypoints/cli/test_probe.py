# SPDX-License-Identifier: Apache-2.0
"""`vllm probe` on the demo model: its commands share one engine."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.entrypoints.cli.conftest import DEMO, run_command

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PLACES = ("went home", "came to the harbour", "sat in the garden", "slept")
MOODS = {
    "glad": "The sun shone, and everybody laughed.",
    "gloomy": "The rain fell, and everybody wept.",
}


def write(path: Path, names: tuple[str, ...]) -> Path:
    lines = [
        {"prompt": f"{name} {place}. {MOODS[mood]}", "mood": mood, "place": place}
        for name, place, mood in product(names, PLACES, MOODS)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def run(monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    """Run `vllm probe WORDS` in this process."""
    run_command(monkeypatch, "probe", *words)


def test_a_probe_is_trained_measured_and_evaluated(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    started: list[Any],
) -> None:
    data = write(tmp_path / "data.jsonl", ("Anna", "Max", "Ben"))
    other = write(tmp_path / "other.jsonl", ("Eva", "Tom"))
    file, plot = tmp_path / "probe.safetensors", tmp_path / "probe.png"
    labels = ("--model", DEMO, "--label", "mood", "--positive", "glad")
    train = ("train", *labels, "--data", data, "--out", file)

    run(monkeypatch, *train, "--group", "place", "--plot", plot)
    assert started[0].enable_readouts and started[0].enforce_eager
    told = capsys.readouterr().out
    assert told.startswith("6 texts held out") and "Every layer is perfect" in told
    assert len([line for line in told.splitlines() if "100.0%  1.000" in line]) == 6
    assert plot.read_bytes().startswith(b"\x89PNG")

    run(monkeypatch, *train, "--held-out", other, "--method", "mass-mean")
    told = capsys.readouterr().out
    assert told.startswith("16 texts held out")
    best = told.split("(layer ")[1].split(",")[0]
    (line,) = [one for one in told.splitlines() if one.startswith(f"{best:>5}  ")]
    accuracy, area, fired, falsely = line.split()[1:]

    # The same texts, through the file: the same numbers.
    run(monkeypatch, "eval", file, *labels, "--data", other)
    told = capsys.readouterr().out
    assert f"accuracy   {accuracy} at the threshold 0" in told
    assert f"AUROC      {area}" in told
    assert f"fires at {fired} in positive texts, {falsely} in others" in told


def test_mistakes_end_before_an_engine_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, started: list[Any]
) -> None:
    data = write(tmp_path / "data.jsonl", ("Anna",))
    file = tmp_path / "probe.safetensors"
    plain = ("train", "--model", DEMO, "--out", file, "--data", data)
    good = ("--label", "mood", "--positive", "glad")
    for words, said in (
        (plain, "not ..label"),
        ((*plain, *good[:2]), "--positive"),
        ((*plain, *good, "--group", "mood"), "texts of one class only"),
        ((*plain, *good, "--held-out", tmp_path / "no.jsonl"), "no.jsonl"),
        ((*plain, *good, "--held-out", data, "--group", "place"), "leave one out"),
        (("eval", data, "--model", DEMO, "--data", data, *good), "SAE"),
    ):
        with pytest.raises(SystemExit, match=said):
            run(monkeypatch, *words)
    assert not started

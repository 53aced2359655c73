# SPDX-License-Identifier: Apache-2.0
"""`vllm patch` on the demo model."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.entrypoints.cli.conftest import DEMO, run_command
from vllm.patching import patch_sweep

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

CLEAN, CORRUPT = "the big dog was happy", "the big dog was sad"


def run(monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    run_command(monkeypatch, "patch", *words)


def test_a_sweep_is_shown_drawn_and_written(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    started: list[Any],
    demo_llm: Any,
) -> None:
    out, values = tmp_path / "map.png", tmp_path / "map.json"
    words = (CLEAN, CORRUPT, "--model", DEMO, "--answer", " and", "--foil", " but")
    more = ("--hook", "resid_pre", "--layers", "1-3", "--out", out, "--json", values)
    run(monkeypatch, *words, *more, "--top", 2)
    assert started[0].enable_patching and started[0].enforce_eager
    told = capsys.readouterr().out
    assert told.startswith("logit_diff: clean ") and "noise floor" in told
    assert told.count("pre_attn of layer") == 2 and str(out) in told
    assert out.stat().st_size > 1000
    written = json.loads(values.read_text())
    expected = patch_sweep(
        demo_llm,
        CLEAN,
        CORRUPT,
        hooks="pre_attn",
        layers=[1, 2, 3],
        answer=" and",
        foil=" but",
        progress=False,
    )
    found = np.array(written["values"]["pre_attn"], np.float32)
    assert np.allclose(found, expected.values["pre_attn"], atol=1e-4)
    assert written["tokens"] == list(expected.tokens)


def test_heads_are_swept(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    started: list[Any],
) -> None:
    values = tmp_path / "map.json"
    words = (CLEAN, CORRUPT, "--model", DEMO, "--answer", " and", "--foil", " but")
    more = ("--hook", "z", "--hook-points", "z", "--layers", "1", "--heads", "0,2")
    run(monkeypatch, *words, *more, "--json", values)
    assert started[0].hook_points == ["z"]
    assert capsys.readouterr().out.count("z of layer 1, head ") >= 2
    found = np.array(json.loads(values.read_text())["values"]["z"])
    assert found.shape[:2] == (1, 2) and np.isfinite(found).all()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--answer", " and", "--metric", "best"), "metric must be one of"),
        (("--answer", " and", "--out", "/missing/map.png"), "no folder"),
        (("--answer", " and", "--hook", "z", "--heads", "99"), "z has heads 0 to"),
        (("--answer", " and", "--layers", "99"), "layers"),
        (("--answer", " and", "--foil", " and"), "foil: it must differ"),
    ],
)
def test_mistakes_are_told_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, started: Any, words: Any, message: str
) -> None:
    with pytest.raises(SystemExit, match=message):
        run(monkeypatch, CLEAN, CORRUPT, "--model", DEMO, *words)


def test_a_model_that_cannot_be_loaded_is_told_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = (CLEAN, CORRUPT, "--model", tmp_path / "gone", "--answer", " and")
    with pytest.raises(SystemExit, match=r"vllm patch: model: '.*gone': "):
        run(monkeypatch, *words)

# SPDX-License-Identifier: Apache-2.0
"""The examples of readouts, on one engine."""

import re
import sys
from pathlib import Path

import pytest

from vllm import LLM

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

FOLDER = Path(__file__).parents[2] / "examples" / "readouts"
sys.path.insert(0, str(FOLDER))  # the examples are scripts, not an installed package

import features  # noqa: E402
import lens  # noqa: E402
import live_probe  # noqa: E402
import mean_rows  # noqa: E402

TEXTS = ["The sun shone.", "The rain fell on the old house.", "Ben went home."]


def test_a_probe_stops_the_text(
    demo_llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    output = live_probe.watch(demo_llm)
    assert output.outputs[0].stop_reason == "readout:watch"
    assert len(output.outputs[0].token_ids) < 48
    assert "stopped by readout:watch" in capsys.readouterr().out


def test_the_last_layer_says_what_was_written(
    demo_llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    lens.show(demo_llm, "The old house by the river", tokens=10)
    rows = capsys.readouterr().out.splitlines()[1:]
    words = [re.findall(r"'(?:[^'\\]|\\.)*'|\"[^\"]*\"", row) for row in rows]
    assert len(words) == 9
    # The last layer's likeliest token is the generated one.
    assert [row[-1] for row in words[:-1]] == [row[0] for row in words[1:]]


def test_features_of_each_token(
    demo_llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    width = demo_llm.model_config.get_hidden_size()
    sae = features.random_sae(tmp_path, width)
    demo_llm.register_readout_module("features", str(sae))
    features.show(demo_llm, "The old house by the river", tokens=6)
    printed = capsys.readouterr().out.splitlines()
    demo_llm.unregister_readout_module("features")
    assert len(printed) == 5
    assert all(len(re.findall(r"\d+: \d", line)) == 3 for line in printed)


def test_mean_rows_of_a_corpus(
    demo_llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    mean_rows.show(demo_llm, TEXTS)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("3 texts, ")
    assert len(printed) == 7

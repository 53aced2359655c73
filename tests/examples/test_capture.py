# SPDX-License-Identifier: Apache-2.0
"""The capture examples: all on one engine, one of them with its own."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.scripts import Run
from vllm import LLM

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

FOLDER = Path(__file__).parents[2] / "examples" / "capture"
sys.path.insert(0, str(FOLDER))  # the examples are scripts, not an installed package

import compare_prompts  # noqa: E402
import logit_lens  # noqa: E402
import probe_from_parquet  # noqa: E402
import two_agents  # noqa: E402
from small import DEMO_MODEL  # noqa: E402

LAYERS = range(6)


def lines(capsys: pytest.CaptureFixture[str], pattern: str) -> list[Any]:
    """The matches of `pattern` in the printed lines."""
    return re.findall(pattern, capsys.readouterr().out, re.MULTILINE)


def test_the_logit_lens_ends_with_what_the_model_says(
    demo_llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    logit_lens.show(demo_llm, logit_lens.Head(DEMO_MODEL), "The old house by the river")
    printed = capsys.readouterr().out
    found = re.findall(r"^layer (\d+) +('.*'|\".*\") +(\d\.\d\d)$", printed, re.M)
    assert [int(layer) for layer, _, _ in found] == list(LAYERS)
    (said,) = re.findall(r"^model +(.*)$", printed, re.M)
    assert found[-1][1] == said
    assert float(found[-1][2]) > 0.1


def test_the_probe_finds_the_tone(
    demo_llm: LLM, demo_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    probe_from_parquet.show(demo_llm, f"{demo_root}/tables", count=160)
    found = lines(capsys, r"^layer (\d+) +(\d\.\d\d) of 40 unseen stories$")
    assert [int(layer) for layer, _ in found] == list(LAYERS)
    assert max(float(share) for _, share in found) > 0.6


def test_prompts_are_compared(
    demo_llm: LLM, demo_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compare_prompts.show(demo_llm, f"{demo_root}/files", compare_prompts.PROMPTS)
    titles = ["layer 0, mean over the prompt", "layer 5, mean over the prompt"]
    printed = capsys.readouterr().out
    blocks = re.split(r"^(.*):$", printed, flags=re.M)[1:]
    assert blocks[::2] == [*titles, "layers of prompt 0"]
    for block, size in zip(blocks[1::2], (3, 3, 6)):
        rows = [line.split()[1:] for line in block.strip("\n").splitlines()[1:]]
        assert len(rows) == size
        for index, row in enumerate(rows):
            assert len(row) == size and row[index] == "1.00"


def test_a_script_runs_by_itself(
    run_script: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = FOLDER / "compare_prompts.py"
    monkeypatch.setattr(sys, "argv", [str(script), "One day", "At night"])
    assert "layers of prompt 0:" in run_script(script.read_text())


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda p: p.name)
def test_an_example_stays_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 60


def test_two_agents_are_compared(
    demo_llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    two_agents.show(demo_llm, turns=3)
    printed = capsys.readouterr().out
    said = re.findall(r"^([AB]): (.+)$", printed, re.M)
    assert [name for name, _ in said] == ["A", "B"] * 3
    assert len({text for _, text in said}) > 2
    found = re.findall(r"^ +(\d)((?: +-?\d\.\d\d){6})$", printed, re.M)
    assert [int(turn) for turn, _ in found] == [0, 1, 2]
    values = [float(one) for _, row in found for one in row.split()]
    assert min(values) < 0.9 and all(-1 <= one <= 1 for one in values)

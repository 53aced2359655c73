# SPDX-License-Identifier: Apache-2.0
"""The tasks of 25 lines on the real model."""

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.scripts import load

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "tasks"
TASKS = ("probe", "lens", "steer", "ablate", "patch")
DOCS = (ROOT / "docs" / "start" / "tasks.md").read_text().splitlines()
sys.path.insert(0, str(FOLDER))  # the examples are scripts


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    real = importlib.import_module("real")
    opened = real.model(hook_points=["z"])
    yield opened
    opened.llm_engine.engine_core.shutdown()


@pytest.fixture
def run(llm: Any, capsys: pytest.CaptureFixture[str]) -> Any:
    def call(name: str) -> list[str]:
        load(FOLDER, name).main(llm)
        return capsys.readouterr().out.splitlines()

    return call


@pytest.mark.parametrize("name", TASKS)
def test_a_task_has_at_most_25_lines(name: str) -> None:
    assert len((FOLDER / f"{name}.py").read_text().splitlines()) <= 25


@pytest.mark.e2e
@pytest.mark.slow
def test_a_probe_tells_sentences_it_has_not_seen(run: Any) -> None:
    lines = run("probe")
    assert [line.split()[0] for line in lines] == ["happy", "sad", "happy"]
    assert all(line in DOCS for line in lines)


@pytest.mark.e2e
@pytest.mark.slow
def test_a_lens_sees_the_answer_come_in_the_last_layers(run: Any) -> None:
    lines = run("lens")
    best = [re.findall("'(.*?)'", line) for line in lines]
    assert len(lines) == 30 and best[-1][0] == " Paris"
    assert not any(" Paris" in words for words in best[:20])
    assert sum(line in DOCS for line in lines) >= 4, "the page shows another model"


@pytest.mark.real
@pytest.mark.e2e
@pytest.mark.slow
def test_steering_changes_the_answer(run: Any) -> None:
    lines = run("steer")
    assert [line[:2] for line in lines] == ["-2", "+0", "+2"]
    assert len({line[3:] for line in lines}) == 3
    assert re.search("glad|happy|excited", lines[2])


@pytest.mark.real
@pytest.mark.e2e
@pytest.mark.slow
def test_ablation_takes_the_mood_out(run: Any) -> None:
    happy, ablated = (line.lower() for line in run("ablate"))
    assert re.search("glad|happy|love", happy)
    assert not re.search("glad|happy|love", ablated)


@pytest.mark.e2e
@pytest.mark.slow
def test_patching_finds_the_fact_until_it_has_moved_on(run: Any) -> None:
    _, *rows, _, first, _, _ = run("patch")
    shares = {int(row.split()[0]): [float(x) for x in row.split()[1:]] for row in rows}
    assert shares[1][3] > 0.9 > 0.1 > abs(shares[1][4])
    assert shares[29][4] > 0.9 > 0.1 > abs(shares[29][3])
    assert sum(row in DOCS for row in rows) >= 6, "the page shows another model"
    # A few heads read the country's token at the last one, between these layers.
    assert 21 <= int(first.split()[4]) <= 25 and float(first.split()[-1]) > 0.1
    assert first in DOCS

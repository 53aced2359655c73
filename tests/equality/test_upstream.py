# SPDX-License-Identifier: Apache-2.0
"""With its features off, the fork's outputs equal upstream's bit for bit."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.harness.engine_process import EngineProcess
from benchmarks.harness.environments import make_upstream_environment
from benchmarks.harness.equality import check_processes, compare
from benchmarks.harness.models import demo_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

Sides = tuple[EngineProcess, EngineProcess]


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sides]:
    folder = tmp_path_factory.mktemp("equality")
    python = make_upstream_environment(folder / "upstream")
    with (
        EngineProcess(python, folder / "upstream.log", threads=1) as upstream,
        EngineProcess(Path(sys.executable), folder / "fork.log", threads=1) as fork,
    ):
        yield upstream, fork


def test_either_side_runs_the_vllm_it_should(sides: Sides) -> None:
    theirs, ours = check_processes(*sides)
    assert theirs["file"] != ours["file"]
    assert theirs["torch"] == ours["torch"]


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
def test_greedy_tokens_and_logprobs_of_the_demo_model_are_upstreams(
    sides: Sides, eager: bool
) -> None:
    found = compare(*sides, demo_model(), eager)
    assert found.difference is None
    assert found.tokens > 100 and found.logprobs > 1000

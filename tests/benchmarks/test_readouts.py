# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest

from benchmarks.readouts import compare_steps


def test_bursts_count_and_stalls_do_not(capsys: pytest.CaptureFixture[str]) -> None:
    plain = [[1.0] * 16 for _ in range(5)]
    bursts = [[1.0] * 15 + [5.0] for _ in range(5)]
    stalls = [[1.0] * 16 for _ in range(5)]
    for number, one in enumerate(stalls):
        one[number] = 100.0
    report: dict[str, Any] = {"cases": {}, "off_ms": {}}
    compare_steps({"plain": plain, "bursts": bursts, "stalls": stalls}, "plain", report)
    ratios = {name: one["median"] for name, one in report["cases"].items()}
    assert ratios == {"plain": 1.0, "bursts": 1.25, "stalls": 1.0}
    assert report["cases"]["bursts"]["interval"] == [1.25, 1.25]
    assert report["off_ms"]["plain"] == [1000.0]
    assert "bursts" in capsys.readouterr().out


def test_rounds_may_differ_by_a_step() -> None:
    report: dict[str, Any] = {"cases": {}, "off_ms": {}}
    compare_steps({"plain": [[2.0, 2.0], [2.0]], "x": [[3.0], [3.0]]}, "plain", report)
    assert report["cases"]["x"]["median"] == 1.5

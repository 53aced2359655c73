# SPDX-License-Identifier: Apache-2.0
"""Plots of reports: figures, goals, and identical pictures for identical reports."""

import builtins
import json
from pathlib import Path
from typing import Any, ClassVar

import pytest

from benchmarks.decode_step import SETTLE, compare
from benchmarks.harness import reports
from benchmarks.harness.charts import Goal, Mark, Row, chart_of
from benchmarks.harness.plots import draw, plot_beside

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
COMMITTED = sorted(RESULTS.glob("*.json"))
LARGEST = 65_000


def turns(upstream: float, fork: float) -> dict[str, dict[str, float]]:
    return {
        side: {
            "mean_tpot_ms": 2.0,
            "mean_ttft_ms": 60.0,
            "total_token_throughput": throughput,
        }
        for side, throughput in (("upstream", upstream), ("fork", fork))
    }


def serving_report() -> dict[str, Any]:
    rounds = [
        {"plain": turns(100, slower), "captured prompts": turns(1000, 600)}
        for slower in (97, 98, 100)
    ]
    start = {"upstream": {"seconds": 40.0}, "fork": {"seconds": 44.0}}
    return {
        "command": "python benchmarks/serving.py --fork F --out old.py.json",
        "gpu": "H100",
        "date": "2026-11-21T11:16:49+00:00",
        "rounds": rounds,
        "start": start,
    }


def rows_of(report: dict[str, Any]) -> dict[str, dict[str, Row]]:
    return {
        panel.unit: {row.label: row for row in panel.rows}
        for panel in chart_of(report).panels
    }


def test_a_sweeps_sides_are_drawn_by_their_seconds() -> None:
    sides = {
        "ours 64": {"seconds": 2.0, "all": [1.0, 2.0, 4.0]},
        "loop 1": {"seconds": 9},
    }
    report = {"command": "python benchmarks/patching.py --out x.json", "sides": sides}
    (rows,) = rows_of(report).values()
    assert rows["ours 64"].marks == (Mark(2.0, 1.0, 4.0),)
    assert rows["loop 1"].marks == (Mark(9, 9, 9),)


def test_pages_link_every_committed_result() -> None:
    pages = [
        *RESULTS.parent.rglob("*.md"),
        *(RESULTS.parents[1] / "docs").rglob("*.md"),
    ]
    text = "".join(page.read_text() for page in pages)
    assert COMMITTED
    assert not [p.name for p in RESULTS.iterdir() if p.name not in text]


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_a_committed_result_can_be_drawn_again(path: Path, tmp_path: Path) -> None:
    again = tmp_path / path.name
    again.write_bytes(path.read_bytes())
    plot_beside(json.loads(again.read_text()), again)
    drawn = again.with_suffix(".svg").read_text()
    assert drawn.count("<text") > 5 and len(drawn.encode()) < LARGEST
    if (plot := path.with_suffix(".svg")).exists():
        # Numbers in the SVG may differ in their last digits between machines.
        assert drawn.count("<text") == plot.read_text().count("<text")


def test_the_same_report_gives_the_same_bytes(tmp_path: Path) -> None:
    one, two = tmp_path / "one.svg", tmp_path / "two.svg"
    for target in (one, two):
        draw(chart_of(serving_report()), target)
    assert one.read_bytes() == two.read_bytes()
    assert b"dc:date" not in one.read_bytes()


def test_serving_shows_each_round_over_upstream_at_the_same_load() -> None:
    rows = rows_of(serving_report())
    throughput = rows["throughput / upstream"]
    assert throughput["plain"].marks == (Mark(0.98, 0.97, 1.0),)
    assert throughput["plain"].goal == Goal(0.99, at_most=False)
    assert throughput["captured prompts"].marks == (Mark(0.6, 0.6, 0.6),)
    assert throughput["captured prompts"].goal == Goal(0.9, at_most=False)
    # One token has no time between tokens.
    assert rows["time per output token / upstream"].keys() == {"plain"}
    assert rows["start and memory / upstream"].keys() == {"seconds until ready"}


def test_the_title_says_where_and_when() -> None:
    assert chart_of(serving_report()).title == "Serving\nH100, 2026-11-21"


def test_a_report_of_something_else_is_refused() -> None:
    with pytest.raises(ValueError, match="other"):
        chart_of({"command": "python other.py"})


class Replayed:
    """An engine on a GPU whose clock slows down equally for both sides."""

    asked: ClassVar[list[str]]

    def __init__(self, name: str, times: float) -> None:
        self.name, self.times = name, times

    def record(self) -> None:
        self.asked.append(f"{self.name}'s graphs")

    def milliseconds(self, case: str, batch: int) -> float:
        self.asked.append(f"{self.name}'s {case}")
        return self.times * (batch + len(self.asked))


def test_a_decode_steps_ratios_are_to_upstreams_beside_it() -> None:
    Replayed.asked = []
    upstream, fork = Replayed("upstream", 1.0), Replayed("fork", 1.5)
    found = compare(upstream, fork, ["one layer captured"], [1000], rounds=5)
    recorded = ["upstream's graphs", "fork's graphs"]
    theirs, ours = "upstream's plain", "fork's one layer captured"
    settled = [theirs] * SETTLE + ["fork's plain"] * SETTLE
    round_ = 2 + 2 * SETTLE + 7
    assert Replayed.asked[: 2 * round_] == [
        *(*recorded, *settled, *[theirs, ours] * 3, theirs),
        *(*recorded, *settled, *[ours, theirs] * 3, ours),
    ]
    ratio = found["ratio"]["one layer captured"][1000]
    low, high = found["range"]["one layer captured"][1000]
    assert [low, ratio, high] == pytest.approx([1.5] * 3, rel=1e-9)
    Replayed.asked = []
    noise = compare(upstream, upstream, ["plain"], [1000], rounds=1)
    assert Replayed.asked == ["upstream's graphs", *[theirs] * (SETTLE + 7)]
    report = {
        "command": "python benchmarks/decode_step.py",
        "model": "8b: Llama",
        "variants": {"upstream": noise, "both": found},
    }
    (rows,) = rows_of(report).values()
    noisy = rows["upstream / upstream (noise)"].marks[0].median
    assert noisy == pytest.approx(1.0, abs=0.002)
    assert rows["one layer captured"] == Row(
        "one layer captured",
        (Mark(ratio, low, high, label="batch 1000"),),
        Goal(1.01),
    )


def test_without_matplotlib_a_benchmark_goes_on_and_says_so_once(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = builtins.__import__

    def refuse(name: str, *rest: Any, **more: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return original(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)
    path = tmp_path / "new" / "serving.json"
    reports.write(serving_report(), path)
    assert json.loads(path.read_text())["gpu"] == "H100"
    assert not path.with_suffix(".svg").exists()
    assert capsys.readouterr().out.count("No plot") == 1

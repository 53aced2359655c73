# SPDX-License-Identifier: Apache-2.0
"""Draws a report as an SVG beside its JSON; equal reports give equal bytes.

    python benchmarks/harness/plots.py benchmarks/results/*.json

Each row is a case: a dot at the median, a thin line over the range, a thick one over
the 95 % interval where there is one, and a mark at the goal that points to where the
figures should lie. Needs matplotlib; without it a benchmark says so and goes on.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # for `benchmarks`

from benchmarks.harness.charts import Chart, Mark, Panel, Row, chart_of  # noqa: E402

GOAL, PLAIN = "#c0392b", "#1f4e79"
SHADES = ("#9ecae1", "#6baed6", "#4292c6", "#2171b5", "#084594")
"""Colours of the marks in one row, in order."""
ROW_INCHES, WIDTH_INCHES = 0.3, 8.0


def plot_beside(report: dict[str, Any], path: Path) -> None:
    """Draw the report stored at `path`, if matplotlib is installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        print(
            "No plot: matplotlib is not installed here. Where it is, draw it with "
            f"python benchmarks/harness/plots.py {path.name}"
        )
        return
    target = path.with_suffix(".svg")
    draw(chart_of(report), target)
    print(f"Drawn to {target}")


def draw(chart: Chart, target: Path) -> None:
    """Write the chart as an SVG."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        # Text is not converted to paths, and ids are made from a fixed salt.
        matplotlib.rcParams["svg.fonttype"] = "none"
        matplotlib.rcParams["svg.hashsalt"] = "clearbox"
        matplotlib.rcParams["font.size"] = 9
        matplotlib.rcParams["font.sans-serif"] = ["DejaVu Sans", "Arial"]
        rows = [len(panel.rows) for panel in chart.panels]
        height = ROW_INCHES * sum(rows) + 0.75 * len(rows) + 0.6
        figure = Figure(figsize=(WIDTH_INCHES, height), layout="constrained")
        figure.suptitle(chart.title, fontsize=10)
        axes = figure.subplots(
            len(rows), squeeze=False, gridspec_kw={"height_ratios": rows}
        )
        for axis, panel in zip(axes[:, 0], chart.panels, strict=True):
            _draw_panel(axis, panel)
        metadata = {"Date": None, "Creator": None, "Rights": "Apache-2.0"}
        figure.savefig(target, format="svg", facecolor="white", metadata=metadata)
    target.write_text(_smaller(target.read_text()))


def _smaller(svg: str) -> str:
    """The SVG without indentation, with coordinates rounded to 0.01 points."""
    svg = re.sub(r"(\d\.\d\d)\d{3,}", r"\1", svg)
    return "".join(f"{line.strip()}\n" for line in svg.splitlines() if line.strip())


def _draw_panel(axis: Any, panel: Panel) -> None:
    if panel.is_ratio:
        axis.axvline(1, color="#999999", linewidth=1)
    for number, row in enumerate(panel.rows):
        for place, mark, color in _placed(number, row):
            axis.hlines(place, mark.low, mark.high, color=color, linewidth=1)
            if mark.interval is not None:
                axis.hlines(place, *mark.interval, color=color, linewidth=3.5)
            label = mark.label if number == 0 and mark.label else None
            axis.plot(mark.median, place, "o", color=color, markersize=4.5, label=label)
        axis.annotate(
            panel.text_of(row),
            (1.01, number),
            xycoords=axis.get_yaxis_transform(),
            va="center",
            fontsize=8,
        )
    _draw_goals(axis, panel)
    axis.set_yticks(range(len(panel.rows)), [row.label for row in panel.rows])
    axis.set_ylim(len(panel.rows) - 0.4, -0.6)
    axis.set_xlabel(panel.unit, fontsize=8)
    axis.grid(axis="x", color="#eeeeee")
    axis.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.tick_params(axis="y", length=0)
    handles, _ = axis.get_legend_handles_labels()
    if handles:
        axis.legend(
            fontsize=7,
            loc="lower right",
            bbox_to_anchor=(1, 1),
            ncols=len(handles),
            frameon=False,
        )


def _draw_goals(axis: Any, panel: Panel) -> None:
    label: str | None = "goal"
    for number, row in enumerate(panel.rows):
        if row.goal is None:
            continue
        ends = number - 0.42, number + 0.42
        axis.vlines(row.goal.value, *ends, color=GOAL, linewidth=1.4)
        pointer = "<" if row.goal.at_most else ">"
        axis.plot(
            row.goal.value, ends[0], pointer, color=GOAL, markersize=4, label=label
        )
        label = None


def _placed(number: int, row: Row) -> Iterator[tuple[float, Mark, str]]:
    """A row's marks with positions and colours, from top to bottom."""
    count = len(row.marks)
    for index, mark in enumerate(row.marks):
        if count == 1:
            yield number, mark, PLAIN
        else:
            share = index / (count - 1)
            shade = SHADES[round(share * (len(SHADES) - 1))]
            yield number + 0.5 * (share - 0.5), mark, shade


def main(paths: list[str]) -> None:
    """Draw the reports of these files."""
    if not paths:
        sys.exit(
            "Which reports? "
            "python benchmarks/harness/plots.py benchmarks/results/X.json"
        )
    for path in map(Path, paths):
        plot_beside(json.loads(path.read_text()), path)


if __name__ == "__main__":
    main(sys.argv[1:])

# SPDX-License-Identifier: Apache-2.0
"""Plots a sweep, and probes by layer."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.v1.residual.pictures import check_picture
from vllm.v1.residual.tap import Tap
from vllm.v1.steering.errors import fail

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vllm.steering.probes import TrainedProbe
    from vllm.steering.sweep import Cell


def check_can_draw(path: Path) -> None:
    """Check that a plot can be written; see `check_picture`."""
    instead = "or omit --plot, the tables are printed anyway"
    check_picture(path, "plot", instead, fail)


@contextmanager
def drawn(path: Path, width: float, height: float) -> "Iterator[Figure]":
    """A figure to draw in, which is then written to `path`; no display is needed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="tight")
    yield figure
    figure.savefig(path, dpi=130)


def draw_sweep(path: Path, cells: Sequence["Cell"]) -> None:
    """Plot score and perplexity over the coefficient, one line per tap, to `path`."""
    scored = any(not math.isnan(cell.score) for cell in cells)
    values = ("score", "perplexity") if scored else ("perplexity",)
    with drawn(path, 5.5 * len(values), 4.2) as figure:
        for axis, value in zip(
            figure.subplots(1, len(values), squeeze=False)[0], values
        ):
            _draw(axis, cells, value)
        figure.axes[0].legend(title="layer", fontsize=8)


def draw_probes(
    path: Path,
    probes: "Mapping[Tap, TrainedProbe]",
    rates: Mapping[Tap, tuple[float, float]],
) -> None:
    """Plot accuracy and firing rates on held-out texts by layer, to `path`."""
    layers = [layer for layer, _ in probes]
    lines = {
        "accuracy on texts": [probe.accuracy for probe in probes.values()],
        "tokens of positive texts that fire": [rates[tap][0] for tap in probes],
        "tokens of negative texts that fire": [rates[tap][1] for tap in probes],
    }
    with drawn(path, 6, 3.6) as figure:
        axis = figure.subplots()
        for label, shares in lines.items():
            axis.plot(layers, shares, marker="o", markersize=3, label=label)
        axis.set(xlabel="layer", ylabel="share", ylim=(-0.02, 1.02))
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)


def _draw(axis: Any, cells: Sequence["Cell"], value: str) -> None:
    for tap in sorted({cell.tap for cell in cells}):
        line = sorted(
            (cell.scale, getattr(cell, value)) for cell in cells if cell.tap == tap
        )
        label = f"{tap[0]} {tap[1]}"
        axis.plot(*zip(*line, strict=True), marker="o", markersize=3, label=label)
    axis.set_xlabel("coefficient")
    axis.set_ylabel("mean score" if value == "score" else "perplexity, unsteered model")
    axis.grid(alpha=0.3)
    seen = [getattr(cell, value) for cell in cells if getattr(cell, value) > 0]
    if value == "perplexity" and max(seen, default=1) > 10 * min(seen, default=1):
        axis.set_yscale("log")

# SPDX-License-Identifier: Apache-2.0
"""Output of an evaluation: a table, and a plot of effect over damage."""

from collections.abc import Sequence
from pathlib import Path

from vllm.steering.evaluation.candidates import KINDS
from vllm.steering.evaluation.evaluate import Point
from vllm.steering.plot import drawn

COLUMNS = (
    *("layer", "kind", "dose", "auroc", "effect", "right_sign", "kl"),
    *("perplexity", "repetition", "early_ends", "judged"),
)
STYLES = {"vector": "-o", "random": ":x", "shuffled": "--s"}


def points_table(points: Sequence[Point]) -> str:
    """Format a table with one line per candidate and dose."""
    judged = any(point.judged == point.judged for point in points)
    names = COLUMNS if judged else COLUMNS[:-1]
    lines = [[name.replace("_", " ") for name in names]]
    for point in points:
        cells = [getattr(point, name) for name in names]
        lines.append([f"{c:.3g}" if isinstance(c, float) else str(c) for c in cells])
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths))
        for line in lines
    )


def draw_points(path: Path, points: Sequence[Point], kl_limit: float) -> None:
    """Plot effect over KL with one curve per candidate, and save it to `path`."""
    taps = sorted({(point.layer, point.hook) for point in points})
    with drawn(path, 7, 4.6) as figure:
        axis = figure.subplots()
        for number, tap in enumerate(taps):
            for kind in KINDS:
                line = [
                    p for p in points if (p.layer, p.hook) == tap and p.kind == kind
                ]
                line.sort(key=lambda point: point.dose)
                axis.plot(
                    [max(point.kl, 1e-6) for point in line],
                    [point.effect for point in line],
                    STYLES[kind],
                    color=f"C{number % 10}",
                    markersize=4,
                    label=f"{tap[0]} {tap[1]} {kind}",
                )
        axis.axvline(kl_limit, color="grey", linewidth=1)
        axis.axhline(0, color="grey", linewidth=0.5)
        axis.set_xscale("log")
        axis.set_xlabel("damage: KL from the plain model on harmless prompts, nats")
        axis.set_ylabel("effect: change of log-odds on held-out pairs, nats")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)

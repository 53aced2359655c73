# SPDX-License-Identifier: Apache-2.0
"""Draws the maps of a sweep: with matplotlib, or by the code of the page `/lens`."""

from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm.patching.result import PatchResult
from vllm.v1.residual.pictures import check_picture
from vllm.v1.steering.errors import fail

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(result: PatchResult, path: str | PathLike[str] | None) -> "Figure":
    """Draw a map of each hook point (and head), and write it to `path` if given.

    Raises:
        SteeringValidationError: matplotlib is not installed, or there is no such
            folder.

    """
    check_can_draw(path)
    from matplotlib.figure import Figure

    maps = list(_maps(result))
    width = max(3.0, 0.32 * len(result.positions) + 1.5)
    height = max(2.5, 0.16 * len(result.layers) + 1.6)
    figure = Figure(figsize=(width * len(maps), height), layout="constrained")
    most = _largest(result)
    for number, (title, values) in enumerate(maps):
        axis = figure.add_subplot(1, len(maps), number + 1)
        image = axis.imshow(
            values - result.baseline,
            cmap="RdBu",
            vmin=-most,
            vmax=most,
            aspect="auto",
            origin="lower",
            interpolation="nearest",
        )
        axis.set_title(title)
        axis.set_ylabel("layer")
        step = max(len(result.layers) // 16, 1)
        rows = range(0, len(result.layers), step)
        axis.set_yticks(rows, [str(result.layers[row]) for row in rows])
        labels = _labels(result)
        axis.set_xticks(range(len(labels)), labels, rotation=90, fontsize=7)
        if number == len(maps) - 1:
            figure.colorbar(image, ax=axis, label=f"change of {result.metric}")
    if path is not None:
        figure.savefig(path, dpi=130)
    return figure


def check_can_draw(path: str | PathLike[str] | None) -> None:
    """Check that a picture can be written, or shown; see `check_picture`."""
    instead = ".values has the numbers"
    check_picture(None if path is None else Path(path), "path", instead, fail)


def page_parts(result: PatchResult) -> list[dict[str, Any]]:
    """The maps, as `clearbox_client.html` draws them."""
    sweep = result.as_json()
    return [{"kind": "patch", "sweep": {**sweep, "grids": sweep.pop("values")}}]


def save_html(result: PatchResult, path: str | PathLike[str]) -> None:
    """Write one HTML file of the maps, which loads nothing.

    Raises:
        SteeringValidationError: clearbox-client, which draws them, is not installed.

    """
    try:
        from clearbox_client.html import document
    except ImportError:
        raise fail(
            "save_html: the client draws the maps: pip install clearbox-client; "
            "heatmap draws them with matplotlib",
            "path",
            str(path),
        ) from None
    Path(path).write_text(document(page_parts(result)), encoding="utf-8")


def _maps(result: PatchResult) -> Iterator[tuple[str, Any]]:
    """A title and values `[layers, columns]` for each hook point and head."""
    for hook, values in result.values.items():
        if result.heads is None:
            yield hook, values
        elif len(result.positions) == 1:
            yield f"{hook}, by head", values[:, :, 0]
        else:
            for number, head in enumerate(result.heads):
                yield f"{hook}, head {head}", values[:, number]


def _labels(result: PatchResult) -> list[str]:
    if result.heads is not None and len(result.positions) == 1:
        return [str(head) for head in result.heads]
    return [
        f"{result.tokens[group[0]].strip() or '·'} {group[0]}"
        if len(group) == 1
        else f"{group[0]} to {group[-1]}"
        for group in result.positions
    ]


def _largest(result: PatchResult) -> float:
    """The largest change, by which colours are scaled."""
    changes = [np.abs(one - result.baseline) for one in result.values.values()]
    finite = np.concatenate([one[np.isfinite(one)].ravel() for one in changes])
    return float(finite.max()) or 1.0 if finite.size else 1.0

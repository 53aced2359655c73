# SPDX-License-Identifier: Apache-2.0
"""Text output of the commands: tables, and texts side by side."""

import textwrap
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Literal

from vllm.steering.directions import Direction
from vllm.v1.residual.tap import Tap
from vllm.v1.steering.spec.files import VectorSet

if TYPE_CHECKING:
    from vllm.steering.sweep import Cell


def separation_table(directions: Mapping[Tap, Direction]) -> str:
    """A table of the vectors' norms and of how well they separate the pairs."""
    lines = ["layer  point       norm     of stream  in order  explained"]
    for (layer, hook), found in sorted(directions.items()):
        share = found.norm / found.stream_norm if found.stream_norm else 0.0
        lines.append(
            f"{layer:5}  {hook:<10}  {found.norm:7.3f}  {share:9.1%}  "
            f"{found.in_order:8.0%}  {found.explained:9.0%}"
        )
    return "\n".join(lines)


def vectors_table(vectors: VectorSet) -> str:
    """A table of the vectors' norms, followed by their provenance."""
    lines = ["layer  point       norm"]
    lines += [
        f"{layer:5}  {hook:<10}  {vectors.norm((layer, hook)):.5g}"
        for layer, hook in vectors.taps
    ]
    said = vectors.provenance.metadata()
    shown = {name: text for name, text in said.items() if name != "norms"}
    return "\n".join([*lines, *(f"{name}: {text}" for name, text in shown.items())])


def sweep_table(cells: Sequence["Cell"], value: Literal["score", "perplexity"]) -> str:
    """A table with a row for each tap and a column for each coefficient."""
    scales = sorted({cell.scale for cell in cells})
    places = {(cell.tap, cell.scale): cell for cell in cells}
    width = max(9, *(len(f"{scale:+g}") + 2 for scale in scales))
    lines = ["layer  point     " + "".join(f"{scale:>+{width}g}" for scale in scales)]
    for tap in sorted({cell.tap for cell in cells}):
        numbers = [getattr(places[tap, scale], value) for scale in scales]
        shown = "".join(f"{number:{width}.3f}" for number in numbers)
        lines.append(f"{tap[0]:5}  {tap[1]:<10}{shown}")
    return "\n".join(lines)


def side_by_side(titles: Sequence[str], texts: Sequence[str], width: int) -> str:
    """Format texts in columns under their titles.

    Args:
        titles: one per text.
        texts: line breaks in them become blanks.
        width: total width in characters; a column has at least 16.

    """
    each = max(16, (width + 3) // len(texts) - 3)
    columns = [
        [title[:each], "-" * each, *textwrap.wrap(" ".join(text.split()), each)]
        for title, text in zip(titles, texts, strict=True)
    ]
    lines = zip_longest(*columns, fillvalue="")
    return "\n".join(
        " | ".join(f"{part:<{each}}" for part in line).rstrip() for line in lines
    )

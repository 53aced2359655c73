# SPDX-License-Identifier: Apache-2.0
"""HTML for notebooks: a table of rows, a heat map of norms by layer and position."""

from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from clearbox_client.readouts import Readout
    from clearbox_client.rows import Rows, RowSet
    from numpy.typing import NDArray

MOST_LINES = 30
SHOWN_VALUES = 5


def table_of(rows: "Rows") -> str:
    """Position, token, norm and first values of each row, as an HTML table."""
    norms = rows.norms
    lines = [
        [
            str(position),
            label(rows, number),
            f"{norms[number]:.4g}",
            " ".join(f"{v:.3g}" for v in rows.values[number][:SHOWN_VALUES]),
        ]
        for number, position in enumerate(rows.positions[:MOST_LINES])
    ]
    place = f"layer {rows.layer}, {rows.hook}{_heads(rows)}"
    title = f"{place}: {rows.values.shape} {rows.dtype}"
    head = ["position", "token", "norm", "first values"]
    return _table(title, head, lines, len(rows))


def readout_of(readout: "Readout") -> str:
    """The arrays of a readout as an HTML table, one line per position."""
    names, arrays = list(readout.arrays), readout.arrays.values()
    title = f"{readout.kind} at {readout.taps}"
    # Reduced arrays have one value per tap.
    by_position = all(len(one) == len(readout.positions) for one in arrays)
    kind = "position" if by_position else "tap"
    keys = readout.positions if by_position else readout.taps
    lines = [
        [str(key), *(_short(one[number]) for one in arrays)]
        for number, key in enumerate(keys[: MOST_LINES if by_position else None])
    ]
    error = f"<p>{escape(readout.error)}</p>" if readout.error else ""
    return _table(title, [kind, *names], lines, len(keys)) + error


def _table(title: str, head: list[str], lines: list[list[str]], count: int) -> str:
    """An HTML table of some of `count` lines."""
    rows = [
        "<tr>" + "".join(f"<{kind}>{escape(c)}</{kind}>" for c in cells) + "</tr>"
        for kind, cells in (("th", head), *(("td", line) for line in lines))
    ]
    note = f"<p>and {count - len(lines)} more</p>" if count > len(lines) else ""
    return f"<b>{escape(title)}</b><table>{''.join(rows)}</table>{note}"


def _short(values: "NDArray[Any]") -> str:
    flat = np.ravel(values)
    more = " ..." if len(flat) > SHOWN_VALUES else ""
    return " ".join(f"{value:.4g}" for value in flat[:SHOWN_VALUES]) + more


def label(rows: "Rows", number: int) -> str:
    """The label of a row: its token, if known, or its position."""
    if rows.tokens is not None:
        return repr(rows.tokens[number])
    token = rows.token_ids[number]
    return "" if token is None else f"#{token}"


def heat_map_of(rows: "RowSet") -> str:
    """Norms as an SVG with a line per layer and hook point, and a column per row."""
    if not rows:
        return "<i>no rows</i>"
    taps, cell = list(rows), 14
    norms = [np.log1p(rows[tap].norms) for tap in taps]
    filled = [line for line in norms if len(line)]
    low = min((float(line.min()) for line in filled), default=0.0)
    high = max((float(line.max()) for line in filled), default=1.0)
    columns = max(map(len, norms))
    parts = []
    for y, (tap, line) in enumerate(zip(taps, norms)):
        tap_name = escape(f"{tap[0]} {tap[1]}")
        parts.append(
            f'<text x="94" y="{y * cell + 11}" font-size="10" text-anchor="end">'
            f"{tap_name}</text>"
        )
        for x, value in enumerate(line):
            share = (float(value) - low) / ((high - low) or 1.0)
            title = escape(
                f"position {rows[tap].positions[x]} {label(rows[tap], x)}"
                f"{_heads(rows[tap])}: {np.expm1(value):.4g}"
            )
            parts.append(
                f'<rect x="{100 + x * cell}" y="{y * cell}" width="{cell}" '
                f'height="{cell}" fill="{colour(share)}"><title>{title}</title></rect>'
            )
    width, height = 104 + columns * cell, len(taps) * cell + 2
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}">'
        + "".join(parts)
        + "</svg>"
    )


def _heads(rows: "Rows") -> str:
    return f", heads {list(rows.heads)}" if rows.heads else ""


def colour(share: float) -> str:
    """A colour from dark blue (0) to yellow (1)."""
    ends = ((40, 20, 90), (40, 130, 140), (250, 220, 60))
    first = min(int(share * 2), 1)
    part = share * 2 - first
    mixed = (a + (b - a) * part for a, b in zip(ends[first], ends[first + 1]))
    return "#" + "".join(f"{round(value):02x}" for value in mixed)

# SPDX-License-Identifier: Apache-2.0
"""The demo's picture: the norm of the residual stream, by layer and token."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # renders to a file, without a window

from comparing import Rows
from matplotlib import pyplot
from matplotlib.colors import LogNorm


def norms(rows: Rows) -> list[list[float]]:
    """Norms of the rows, `[blocks + 1][R]`: before block 0, then after each block."""
    last = max(layer for layer, _ in rows)
    streams = [rows[0, "pre_attn"]]
    streams += [rows[layer, "post_block"] for layer in range(last + 1)]
    return [stream.float().norm(dim=-1).tolist() for stream in streams]


def draw(path: Path, rows: Rows, tokens: list[str], num_prompt_tokens: int) -> None:
    """Write the picture of one request as a PNG."""
    values = norms(rows)
    figure, axes = pyplot.subplots(figsize=(max(8.0, 0.27 * len(tokens) + 2), 4.6))
    image = axes.imshow(
        values, aspect="auto", origin="lower", cmap="viridis", norm=LogNorm()
    )
    names = ["embedding", *(f"block {index}" for index in range(len(values) - 1))]
    axes.set_yticks(range(len(names)), names)
    axes.set_xticks(range(len(tokens)), tokens, rotation=90, fontsize=8)
    axes.axvline(num_prompt_tokens - 0.5, color="white", linewidth=2)
    where = axes.get_xaxis_transform()
    for text, x, side in (
        ("prompt ", num_prompt_tokens - 0.7, "right"),
        (" generated", num_prompt_tokens - 0.3, "left"),
    ):
        axes.text(x, 1.02, text, transform=where, ha=side, fontsize=9)
    axes.set_title("Norm of the residual stream after each block", pad=22)
    axes.set_xlabel("token at the position")
    figure.colorbar(image, ax=axes, label="L2 norm of the row (log scale)", pad=0.015)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)

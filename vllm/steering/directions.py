# SPDX-License-Identifier: Apache-2.0
"""From rows of contrasting texts to a direction.

Legend: N pairs, H hidden size.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Method = Literal["mean", "pca"]

Rows: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Direction:
    """A vector, and how well it tells the two sides apart."""

    vector: npt.NDArray[np.float32]  # [H]
    in_order: float
    """Share of the pairs whose positive text lies further along the vector."""
    explained: float
    """Share of the pairs' squared differences that lies along the vector."""
    stream_norm: float
    """Mean length of a row, which tells how strong a vector of some length is."""

    @property
    def norm(self) -> float:
        """The length of the vector."""
        return float(np.linalg.norm(self.vector.astype(np.float64)))


def direction(positive: Rows, negative: Rows, method: Method = "mean") -> Direction:
    """What leads from the negative to the positive side.

    - `mean`: the mean of the differences, `mean(p_i - n_i)`.
    - `pca`: the first principal component `u` of the rows after each pair's mean was
      taken from both; its sign and length are those of the mean difference along it,
      `mean((p_i - n_i) . u) u`.

    So a vector times 1 moves a row as far as the two sides are apart on average.

    Args:
        positive: `[N, H]`.
        negative: `[N, H]`, the other side of each pair.
        method: how to find the direction.

    """
    differences = positive.astype(np.float64) - negative.astype(np.float64)
    assert differences.ndim == 2 and len(differences), differences.shape
    mean = differences.mean(axis=0)
    vector = mean
    if method == "pca":
        # Rows less their pair's mean are plus and minus half of the difference.
        axis = np.linalg.svd(differences, full_matrices=False)[2][0]
        vector = (mean @ axis) * axis
    unit = vector / max(float(np.linalg.norm(vector)), np.finfo(np.float64).tiny)
    along = differences @ unit
    total = float(np.square(differences).sum())
    both = np.concatenate([positive, negative]).astype(np.float64)
    return Direction(
        vector.astype(np.float32),
        in_order=float((along > 0).mean()),
        explained=float(np.square(along).sum()) / total if total else 0.0,
        stream_norm=float(np.linalg.norm(both, axis=1).mean()),
    )

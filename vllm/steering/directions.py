# SPDX-License-Identifier: Apache-2.0
"""Computes a steering direction from the rows of contrasting texts.

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
    """A vector, and measures of how well it separates the two sides."""

    vector: npt.NDArray[np.float32]  # [H]
    in_order: float
    """Fraction of the pairs whose positive text projects further along the vector."""
    explained: float
    """Fraction of the pairs' summed squared differences along the vector."""
    stream_norm: float
    """Mean Euclidean norm of the rows, to which the vector's norm can be compared."""

    @property
    def norm(self) -> float:
        """The Euclidean norm of the vector."""
        return float(np.linalg.norm(self.vector.astype(np.float64)))


def direction(positive: Rows, negative: Rows, method: Method = "mean") -> Direction:
    """The direction from the negative to the positive side.

    - `mean`: the mean difference, `mean(p_i - n_i)`.
    - `pca`: the first principal component `u` of the rows after subtracting each pair's
      mean from both of its rows, with the sign and length of the mean difference along
      it: `mean((p_i - n_i) . u) u`.

    The vector with scale 1 therefore moves a row by the mean distance of the two sides.

    Args:
        positive: `[N, H]`.
        negative: `[N, H]`, the other side of each pair.
        method: `mean` or `pca`.

    """
    differences = positive.astype(np.float64) - negative.astype(np.float64)
    assert differences.ndim == 2 and len(differences), differences.shape
    mean = differences.mean(axis=0)
    vector = mean
    if method == "pca":
        # Rows minus their pair's mean are plus and minus half the difference, so the
        # differences have the same principal axes.
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

# SPDX-License-Identifier: Apache-2.0
"""The vectors that are compared at a tap: the evaluated one and its controls."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm.steering.directions import Rows
from vllm.steering.measures import auroc
from vllm.v1.residual.tap import Tap

VECTOR, RANDOM, SHUFFLED = "vector", "random", "shuffled"
KINDS = (VECTOR, RANDOM, SHUFFLED)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A unit vector at a tap."""

    tap: Tap
    kind: str
    """`vector`, `random` or `shuffled`.

    `random` is drawn from a Gaussian. `shuffled` is the mean difference of the held-out
    pairs after swapping the sides of a random half of them.
    """
    unit: npt.NDArray[np.float64]  # [H]
    auroc: float
    """AUROC of the projections of held-out positive and negative texts."""
    stream_norm: float
    """Mean Euclidean norm of the held-out texts' rows at the tap."""

    def vector(self, dose: float) -> npt.NDArray[np.float32]:
        """The vector `[H]` to add; its norm is `dose` times the stream's mean norm."""
        return (self.unit * dose * self.stream_norm).astype(np.float32)


def candidates(
    tap: Tap,
    vector: npt.NDArray[np.float32],
    positive: Rows,
    negative: Rows,
    seed: int,
) -> list[Candidate]:
    """A vector and its controls.

    Args:
        tap: `(layer, hook)` where the vector acts.
        vector: `[H]`.
        positive: `[N, H]`, the rows of the held-out positive texts.
        negative: `[N, H]`, the rows of the held-out negative texts.
        seed: random seed for the controls.

    """
    chance = np.random.default_rng([seed, tap[0]])
    swaps = chance.permutation(np.where(np.arange(len(positive)) % 2, 1.0, -1.0))
    directions = {
        VECTOR: vector.astype(np.float64),
        RANDOM: chance.normal(size=len(vector)),
        SHUFFLED: ((positive - negative) * swaps[:, None]).mean(axis=0),
    }
    norm = float(np.linalg.norm(np.concatenate([positive, negative]), axis=1).mean())
    return [
        Candidate(tap, kind, unit, auroc(positive @ unit, negative @ unit), norm)
        for kind, direction in directions.items()
        for unit in [_unit(direction)]
    ]


def _unit(direction: Rows) -> Rows:
    """Normalise to length 1; a zero vector is returned unchanged."""
    length = float(np.linalg.norm(direction))
    unit: Rows = direction / length if length else direction
    return unit

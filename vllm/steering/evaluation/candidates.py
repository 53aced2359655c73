# SPDX-License-Identifier: Apache-2.0
"""The vectors that are compared at a place: the one in question, and its controls."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm.steering.directions import Rows
from vllm.steering.evaluation.measures import auroc
from vllm.v1.steering.plan import Tap

VECTOR, RANDOM, SHUFFLED = "vector", "random", "shuffled"
KINDS = (VECTOR, RANDOM, SHUFFLED)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A direction of length 1 at a place."""

    tap: Tap
    kind: str
    """`vector`; `random`: drawn from a Gaussian; `shuffled`: the mean difference of the
    held-out pairs, with the sides of each swapped at random."""
    unit: npt.NDArray[np.float64]  # [H]
    auroc: float
    """How well the projection of held-out texts tells the sides apart."""
    stream_norm: float
    """Mean length of the held-out texts' rows at the place."""

    def vector(self, dose: float) -> npt.NDArray[np.float32]:
        """What is added, so that |change| over |stream| is `dose` on average."""
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
        tap: where it acts.
        vector: `[H]`.
        positive: a row for each held-out pair `[N, H]`.
        negative: the other side.
        seed: of the controls.

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
    """Length 1; zeros stay."""
    length = float(np.linalg.norm(direction))
    unit: Rows = direction / length if length else direction
    return unit

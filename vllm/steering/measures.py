# SPDX-License-Identifier: Apache-2.0
"""Measures of probes and of evaluations."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]


def auroc(positive: Values, negative: Values) -> float:
    """The probability that a positive value exceeds a negative one; ties count half.

    This is the Mann-Whitney U statistic divided by `N * M`.

    Args:
        positive: `[N]`.
        negative: `[M]`.

    """
    values = np.concatenate([positive, negative])
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    size = len(positive)
    above = ranks[:size].sum() - size * (size + 1) / 2
    return float(above / (size * len(negative)))


def divergence(plain: Values, steered: Values) -> float:
    """KL(plain || steered) in nats.

    Args:
        plain: `[V]`, log-probabilities over the vocabulary.
        steered: `[V]`; values below -1e4 count as -1e4.

    """
    seen = np.isfinite(plain)
    terms = np.exp(plain[seen]) * (plain[seen] - np.maximum(steered[seen], -1e4))
    return max(float(terms.sum()), 0.0)


def repetition(token_ids: Sequence[int], n: int = 3) -> float:
    """The fraction of a text's n-grams that repeat an earlier one."""
    grams = [tuple(token_ids[i : i + n]) for i in range(len(token_ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def standard_error(values: Sequence[float]) -> float:
    """The standard error of the mean; infinite for fewer than two values."""
    if len(values) < 2:
        return math.inf
    return float(np.std(np.asarray(values), ddof=1) / math.sqrt(len(values)))

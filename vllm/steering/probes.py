# SPDX-License-Identifier: Apache-2.0
"""Trains linear probes on the rows of labelled texts, with held-out texts.

Two methods: logistic regression with an L2 penalty on standardised rows, whose weights
are converted back to raw rows; and mass-mean probes, the difference of the class means
(arXiv 2310.06824), with the bias at the midpoint.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch

from vllm.steering.directions import Rows
from vllm.steering.extract import read_out
from vllm.steering.labelled import Labels
from vllm.steering.measures import auroc
from vllm.steering.pairs import Prompt
from vllm.v1.residual.tap import Tap

if TYPE_CHECKING:
    from vllm import LLM

Method: TypeAlias = Literal["logistic", "mass-mean"]

_AT_A_TIME = 64
MAX_READOUTS = 64
"""Readouts of one request."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainedProbe:
    """A probe `row @ vector + bias`, and its metrics on held-out texts."""

    vector: torch.Tensor  # [hidden_size], float32
    bias: float
    accuracy: float
    """Fraction of held-out texts classified correctly by the sign of the value."""
    auroc: float
    """Probability that a held-out positive text scores above a negative one."""


def train(
    rows: Rows, labels: Labels, test: Labels, method: Method, penalty: float = 1.0
) -> TrainedProbe:
    """Train a probe on the rows of one tap.

    Args:
        rows: `[texts, hidden_size]`.
        labels: `[texts]`.
        test: `[texts]`, true for held-out texts.
        method: `logistic` or `mass-mean`.
        penalty: L2 penalty of the logistic regression, on the weights of standardised
            rows.

    """
    known, answers = rows[~test], labels[~test]
    fit = _logistic if method == "logistic" else _mass_mean
    vector, bias = fit(known, answers, penalty)
    scores = rows[test] @ vector + bias
    accuracy = float(((scores > 0) == labels[test]).mean())
    truth = labels[test]
    area = auroc(scores[truth], scores[~truth])
    return TrainedProbe(torch.from_numpy(vector).float(), bias, accuracy, area)


def _mass_mean(rows: Rows, labels: Labels, _: float) -> tuple[Rows, float]:
    above, below = rows[labels].mean(axis=0), rows[~labels].mean(axis=0)
    vector = above - below
    return vector, float(-(above + below) @ vector / 2)


def _logistic(rows: Rows, labels: Labels, penalty: float) -> tuple[Rows, float]:
    """Minimise the mean log-loss plus `penalty / (2 n) |w|²` by L-BFGS."""
    mean, spread = rows.mean(axis=0), rows.std(axis=0) + 1e-8
    x = torch.from_numpy((rows - mean) / spread)
    y = torch.from_numpy(labels.astype(np.float64))
    weights = torch.zeros(x.shape[1] + 1, dtype=torch.float64, requires_grad=True)
    search = "strong_wolfe"
    optimiser = torch.optim.LBFGS([weights], max_iter=200, line_search_fn=search)

    def loss() -> torch.Tensor:
        optimiser.zero_grad()
        logits = x @ weights[:-1] + weights[-1]
        value = torch.nn.functional.binary_cross_entropy_with_logits(logits, y)
        value = value + penalty / (2 * len(y)) * weights[:-1].square().sum()
        value.backward()
        return value

    with torch.enable_grad():
        optimiser.step(loss)
    found = weights.detach().numpy()
    vector = found[:-1] / spread
    return vector, float(found[-1] - vector @ mean)


def best_of(
    probes: Mapping[Tap, TrainedProbe], rates: Mapping[Tap, tuple[float, float]]
) -> Tap:
    """The tap of the best probe by AUROC, then accuracy, then margin on tokens.

    Args:
        probes: by tap.
        rates: the shares of tokens at which each fires, see `firing_rates`; their
            difference is the margin.

    """

    def merit(tap: Tap) -> tuple[float, float, float]:
        fired, falsely = rates[tap]
        return probes[tap].auroc, probes[tap].accuracy, fired - falsely

    return max(sorted(probes), key=merit)


def token_values(
    llm: "LLM", prompts: Sequence[Prompt], specs: Mapping[str, Mapping[str, Any]]
) -> dict[str, list[Rows]]:
    """The values of probes at every token of prompts.

    Args:
        llm: an engine with readouts enabled.
        prompts: texts or chats.
        specs: readouts of probes with one value, without positions, by name.

    Returns:
        By name and prompt `[tokens]` float64.

    Raises:
        RuntimeError: a readout failed.

    """
    values: dict[str, list[Rows]] = {name: [] for name in specs}
    names = list(specs)
    for first in range(0, len(names), MAX_READOUTS):
        own = names[first : first + MAX_READOUTS]
        readouts = {name: {**specs[name], "positions": "all_prompt"} for name in own}
        for start in range(0, len(prompts), _AT_A_TIME):
            some = prompts[start : start + _AT_A_TIME]
            for results in read_out(llm, some, readouts):
                for name, result in results.items():
                    values[name].append(result["values"][:, 0].astype(np.float64))
    return values


def firing_rates(
    values: Sequence[Rows], labels: Labels, threshold: float = 0.0
) -> tuple[float, float]:
    """Shares of the tokens of positive, and of negative, texts above a threshold."""
    fires = [own > threshold for own in values]
    sides = [
        np.concatenate([own for own, label in zip(fires, labels) if label == side])
        for side in (True, False)
    ]
    return float(sides[0].mean()), float(sides[1].mean())

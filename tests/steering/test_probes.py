# SPDX-License-Identifier: Apache-2.0
from typing import Any

import numpy as np
import pytest

from vllm.steering import labelled
from vllm.steering.labelled import Labelled
from vllm.steering.probes import (
    TrainedProbe,
    best_of,
    firing_rates,
    train,
)

WIDTH = 12


def held_out(labels: Any, share: float, seed: int) -> Any:
    return labelled.held_out(Labelled([], labels, None), share, seed)


def texts(count: int = 200, gap: float = 3.0) -> tuple[Any, Any]:
    """Rows of two classes, `gap` apart along the first axis."""
    draw = np.random.default_rng(0)
    labels = np.arange(count) % 2 == 0
    rows = draw.normal(size=(count, WIDTH)) * np.linspace(0.5, 4, WIDTH) + 7
    rows[labels, 0] += gap
    return rows, labels


@pytest.mark.parametrize("method", ["logistic", "mass-mean"])
def test_probes_part_what_can_be_parted(method: Any) -> None:
    rows, labels = texts(gap=6.0)
    test = held_out(labels, 0.25, 0)
    found = train(rows, labels, test, method)
    assert found.accuracy > 0.95
    assert found.auroc > 0.98
    scores = rows @ found.vector.double().numpy() + found.bias
    assert ((scores > 0) == labels).mean() > 0.95


def test_logistic_weighs_noisy_directions_less() -> None:
    rows, labels = texts(2000, gap=2.0)
    test = held_out(labels, 0.25, 0)
    logistic = train(rows, labels, test, "logistic")
    assert logistic.auroc >= train(rows, labels, test, "mass-mean").auroc - 0.01
    assert int(logistic.vector.abs().argmax()) == 0


def test_noise_is_not_parted() -> None:
    rows, labels = texts(gap=0.0)
    found = train(rows, labels, held_out(labels, 0.25, 0), "logistic")
    assert 0.2 < found.auroc < 0.8


def test_the_best_place_is_that_of_the_largest_area_then_margin() -> None:
    zero = np.zeros(1)
    probes = {
        (layer, "post_block"): TrainedProbe(zero, 0.0, accuracy, area)  # type: ignore[arg-type]
        for layer, accuracy, area in ((0, 0.9, 0.8), (1, 0.7, 0.9), (2, 0.7, 0.9))
    }
    rates = dict.fromkeys(probes, (0.7, 0.6))
    assert best_of(probes, rates) == (1, "post_block")
    assert best_of(probes, rates | {(2, "post_block"): (0.7, 0.0)})[0] == 2


def test_rates_are_over_tokens_by_class() -> None:
    values = [np.array([1.0, -1.0]), np.array([-1.0]), np.array([2.0, 2.0, -2.0, 0.0])]
    labels = np.array([True, False, True])
    assert firing_rates(values, labels) == (3 / 6, 0.0)
    assert firing_rates(values, labels, threshold=1.5) == (2 / 6, 0.0)

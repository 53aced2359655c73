# SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vllm.steering.probes import (
    TrainedProbe,
    auroc,
    best_of,
    held_out,
    read_labelled,
    train,
)
from vllm.v1.readouts.errors import ReadoutValidationError
from vllm.v1.steering.errors import SteeringValidationError

WIDTH = 12
CHAT = {"role": "user", "content": "a"}


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


def test_the_area_counts_ties_half() -> None:
    labels = np.array([True, True, False, False])
    assert auroc(np.array([3.0, 1.0, 1.0, 0.0]), labels) == 3.5 / 4
    assert auroc(np.zeros(4), labels) == 0.5


def test_each_class_is_held_out_alike() -> None:
    labels = np.array([True] * 40 + [False] * 8)
    test = held_out(labels, 0.25, 1)
    assert (test[labels].sum(), test[~labels].sum()) == (10, 2)
    assert (held_out(labels, 0.25, 1) == test).all()


def test_the_best_place_is_that_of_the_largest_area() -> None:
    zero = np.zeros(1)
    probes = {
        (0, "post_block"): TrainedProbe(zero, 0.0, 0.9, 0.8),  # type: ignore[arg-type]
        (1, "post_block"): TrainedProbe(zero, 0.0, 0.7, 0.9),  # type: ignore[arg-type]
        (2, "post_block"): TrainedProbe(zero, 0.0, 0.7, 0.9),  # type: ignore[arg-type]
    }
    assert best_of(probes) == (1, "post_block")


def write(path: Path, entries: list[Any]) -> Path:
    path.write_text("\n".join(json.dumps(entry) for entry in entries))
    return path


def test_labelled_texts_and_pairs_are_read(tmp_path: Path) -> None:
    pairs = [{"positive": f"p{i}", "negative": f"n{i}"} for i in range(4)]
    found, labels = read_labelled(write(tmp_path / "pairs.jsonl", pairs))
    assert found[:2] == ["p0", "n0"]
    assert labels.tolist() == [True, False] * 4
    lines = [{"text": str(i), "label": i % 2} for i in range(8)]
    found, labels = read_labelled(write(tmp_path / "lines.jsonl", lines))
    assert labels.tolist() == [False, True] * 4


@pytest.mark.parametrize(
    "entries",
    [
        [],
        [5],
        [[1]],
        [{"text": "a", "label": 2}],
        [{"text": "a"}],
        [{"text": "a", "label": 1}] * 9,
        [{"text": 5, "label": n % 2} for n in range(8)],
        [{"text": "", "label": n % 2} for n in range(8)],
        [{"text": ["a", [CHAT]][n % 2], "label": n % 2} for n in range(8)],
    ],
)
def test_bad_data_is_refused(tmp_path: Path, entries: list[Any]) -> None:
    with pytest.raises((ReadoutValidationError, SteeringValidationError)):
        read_labelled(write(tmp_path / "data.jsonl", entries))


def test_a_file_that_is_not_there_or_no_json_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    for said in ("cannot be read", "not JSON Lines"):
        with pytest.raises(SteeringValidationError, match=said):
            read_labelled(file)
        file.write_text('{"text":')

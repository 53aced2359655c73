# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from vllm.steering.directions import direction

rng = np.random.default_rng(0)


def test_the_mean_is_the_mean_of_the_differences() -> None:
    positive, negative = rng.normal(size=(2, 9, 4))
    found = direction(positive, negative)
    expected = positive.mean(axis=0) - negative.mean(axis=0)
    assert np.allclose(found.vector, expected, atol=1e-6)
    assert found.norm == pytest.approx(np.linalg.norm(expected), rel=1e-6)
    lengths = np.linalg.norm(np.concatenate([positive, negative]), axis=1)
    assert found.stream_norm == pytest.approx(lengths.mean())


def test_pca_finds_the_axis_that_the_pairs_differ_along() -> None:
    base = rng.normal(size=(40, 6)) * 10
    axis = np.eye(6)[2]
    steps = rng.uniform(1, 3, size=(40, 1))
    noise = rng.normal(size=(40, 6)) * 0.01
    found = direction(base + steps * axis + noise, base, "pca")
    assert np.allclose(found.vector, steps.mean() * axis, atol=0.05)
    assert found.in_order == 1 and found.explained > 0.99


def test_pca_equals_the_components_of_rows_less_their_pairs_mean() -> None:
    positive, negative = rng.normal(size=(2, 30, 5)) + 1.0
    center = (positive + negative) / 2
    rows = np.concatenate([positive - center, negative - center])
    values, vectors = np.linalg.eigh(rows.T @ rows)
    found = direction(positive, negative, "pca")
    unit = found.vector / found.norm
    assert abs(unit @ vectors[:, -1]) == pytest.approx(1, abs=1e-5)
    assert found.explained == pytest.approx(values[-1] / values.sum(), rel=1e-5)


@given(
    rows=arrays.arrays(
        np.float64,
        st.tuples(st.just(2), st.integers(1, 6), st.just(3)),
        elements=st.floats(-8, 8).map(lambda x: round(x, 2)),
    )
)
@pytest.mark.parametrize("method", ["mean", "pca"])
def test_the_vector_leads_from_negative_to_positive(
    method: str, rows: np.ndarray
) -> None:
    positive, negative = rows
    found = direction(positive, negative, method)  # type: ignore[arg-type]
    other = direction(negative, positive, method)  # type: ignore[arg-type]
    mean = (positive - negative).mean(axis=0)
    assert found.vector @ mean >= -1e-4
    assert np.isfinite(found.vector).all()
    assert np.allclose(found.vector, -other.vector, atol=1e-3)
    assert 0 <= found.in_order <= 1 and 0 <= found.explained <= 1 + 1e-9


def test_pairs_in_the_wrong_order_are_counted() -> None:
    positive = np.array([[1.0, 0], [1, 0], [1, 0], [-1, 0]])
    assert direction(positive, -positive).in_order == 0.75

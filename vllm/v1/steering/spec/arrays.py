# SPDX-License-Identifier: Apache-2.0
"""The arrays of single operations: directions, masks, planes and matrices."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from vllm.v1.residual.numbers import is_integer
from vllm.v1.residual.selectors import as_list
from vllm.v1.steering.errors import fail
from vllm.v1.steering.spec.table import Array, Place, as_array, check_finite, vector

MAX_RANK = 16
"""Most rows that `low_rank` reads and writes."""
PARALLEL = 1e-6
"""Axes of a plane are parallel if their unit vectors differ by less than this."""


def vector_or_number(value: Any, place: Place) -> Array:
    """A vector, or a number that stands for all of its components."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        value = np.full(place.model.hidden_size, value)
    return vector(value, place)


def direction(value: Any, place: Place) -> Array:
    """A vector that is not zero."""
    found = vector(value, place)
    if not found.any():
        raise fail(f"{place.at}: a vector of zeros has no direction", place.at, 0.0)
    return found


def shares(value: Any, place: Place) -> Array:
    """A vector of numbers from 0 to 1; `{"indices": [...]}` has 1 there, else 0."""
    if isinstance(value, Mapping) and value.keys() == {"indices"}:
        value = _indicated(value["indices"], place)
    mask = vector(value, place)
    if not ((mask >= 0) & (mask <= 1)).all():
        worst = float(mask[np.abs(mask - 0.5).argmax()])
        raise fail(f"{place.at} must be between 0 and 1", place.at, worst)
    return mask


def _indicated(raw: Any, place: Place) -> Array:
    indices, width = as_list(raw), place.model.hidden_size
    listed = isinstance(indices, (list, tuple)) and len(indices) > 0
    if not listed or not all(is_integer(i, 0, width) for i in indices):
        raise fail(
            f"{place.at}.indices must list dimensions from 0 to {width - 1}",
            f"{place.at}.indices",
            raw,
        )
    mask = np.zeros(width, dtype=np.float32)
    mask[list(indices)] = 1.0
    return mask


def rows(value: Any, place: Place, count: int | None = None) -> Array:
    """A matrix `[count, hidden_size]`; without `count`, of at least one row."""
    found, width = as_array(value, place.at), place.model.hidden_size
    right = found.ndim == 2 and len(found) and found.shape[1] == width
    if not right or (count is not None and len(found) != count):
        wanted = "at least one row" if count is None else f"{count} rows"
        raise fail(
            f"{place.at} must be {wanted} of {width} numbers, this model's hidden "
            f"size; its shape is {list(found.shape)}",
            place.at,
            list(found.shape),
        )
    return check_finite(found, place.model.dtype, place.at)


def read_rows(value: Any, place: Place) -> Array:
    """The rows `[rank, hidden_size]` that `low_rank` reads."""
    found = rows(value, place)
    if len(found) > MAX_RANK:
        raise fail(
            f"{place.at}: at most {MAX_RANK} rows; split them over several entries",
            place.at,
            len(found),
        )
    return found


def write_rows(value: Any, place: Place) -> Array:
    """The rows that `low_rank` writes, as many as it reads."""
    return rows(value, place, len(place.values["read"]))


def row_numbers(value: Any, place: Place) -> Array:
    """A number for each row that `low_rank` reads."""
    found, count = as_array(value, place.at), len(place.values["read"])
    if found.shape != (count,) or not np.isfinite(found).all():
        raise fail(
            f"{place.at} must be {count} finite numbers, one for each row of read",
            place.at,
            list(found.shape),
        )
    return found


def plane(value: Any, place: Place) -> Array:
    """Orthonormal axes `[2, hidden_size]` of a plane; the first keeps its direction."""
    wide = rows(value, place, 2).astype(np.float64)
    lengths = np.linalg.norm(wide, axis=1)
    if not lengths.all():
        raise fail(
            f"{place.at}: an axis of zeros has no direction", place.at, lengths.tolist()
        )
    first, second = wide / lengths[:, None]
    second = second - (second @ first) * first
    length = np.linalg.norm(second)
    if length < PARALLEL:
        raise fail(
            f"{place.at}: the two axes are parallel and span no plane; give two "
            "directions that differ",
            place.at,
            float(length),
        )
    return np.stack([first, second / length]).astype(np.float32)

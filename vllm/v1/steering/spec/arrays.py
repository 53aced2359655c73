# SPDX-License-Identifier: Apache-2.0
"""Arrays in entries: vectors, and the further arrays of some operations.

Packed as base64 they are `{"dtype", "shape", "data"}`, row-major, little-endian.
"""

import base64
import binascii
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from vllm.v1.residual.bounds import shown
from vllm.v1.residual.numbers import is_integer
from vllm.v1.residual.selectors import as_list
from vllm.v1.steering.errors import fail
from vllm.v1.steering.spec.table import Place

if TYPE_CHECKING:
    from vllm.v1.steering.spec.parse import SteeredModel


DTYPES = {"float16": "<f2", "float32": "<f4", "float64": "<f8"}
NAMES = (*DTYPES, "bfloat16")
KEYS = frozenset({"dtype", "shape", "data"})


def is_packed(raw: Any) -> bool:
    """Whether a value is a packed array without other keys."""
    return isinstance(raw, Mapping) and raw.keys() == KEYS


def unpack_array(
    packed: Mapping[str, Any], at: str, dimensions: tuple[int, ...] = (1, 2)
) -> npt.NDArray[np.float32]:
    """Unpack an array to float32, in its shape.

    Args:
        packed: an object with the keys `dtype`, `shape` and `data`, perhaps among
            others.
        at: the array's name in messages.
        dimensions: the numbers of dimensions that are allowed.

    Raises:
        SteeringValidationError: naming the parameter, the value and the remedy.

    """
    dtype, data = packed["dtype"], packed["data"]
    shape = as_list(packed["shape"])
    if not isinstance(dtype, str) or dtype not in NAMES:
        raise fail(
            f"{at}.dtype: {shown(dtype)} is not one of {list(NAMES)}",
            f"{at}.dtype",
            dtype,
        )
    if not _is_shape(shape, dimensions):
        forms = {1: "[hidden_size]", 2: "[n, hidden_size]"}
        named = [forms.get(n, "[layers, positions, hidden_size]") for n in dimensions]
        raise fail(
            f"{at}.shape must be {' or '.join(named)}",
            f"{at}.shape",
            shape,
        )
    needed = math.prod(shape) * (2 if dtype == "bfloat16" else _size(dtype))
    expected = f"shape {list(shape)} in {dtype} takes {needed}"
    if isinstance(data, (str, bytes)) and len(data) > 2 * needed + 4:
        raise fail(
            f"{at}.data holds {len(data)} characters of base64, but {expected} bytes",
            f"{at}.data",
            len(data),
        )
    raw = _decoded(data, at)
    if len(raw) != needed:
        raise fail(
            f"{at}.data holds {len(raw)} bytes, but {expected}", f"{at}.data", len(raw)
        )
    if dtype == "bfloat16":
        return from_bfloat16(np.frombuffer(raw, dtype="<u2")).reshape(shape)
    with np.errstate(over="ignore"):  # Overflow gives infinity, which is refused later.
        rows = np.frombuffer(raw, dtype=DTYPES[dtype]).astype(np.float32)
    return rows.reshape(shape)


def from_bfloat16(halves: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """The numbers of bfloat16, given as its bits, which NumPy has no dtype for."""
    return (halves.astype(np.uint32) << 16).view(np.float32)


def _size(dtype: str) -> int:
    return np.dtype(DTYPES[dtype]).itemsize


def _is_shape(shape: Any, dimensions: tuple[int, ...]) -> bool:
    if not isinstance(shape, (list, tuple)) or len(shape) not in dimensions:
        return False
    return all(is_integer(size, 1, 1 << 31) for size in shape)


def _decoded(data: Any, at: str) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, TypeError, ValueError) as error:
        raise fail(
            f"{at}.data is not base64: {error}", f"{at}.data", str(data)[:40]
        ) from None


MAX_RANK = 16
"""Most rows that `low_rank` reads and writes."""
PARALLEL = 1e-6
"""Axes of a plane are parallel if their unit vectors differ by less than this."""

Array = npt.NDArray[np.float32]


def vector(value: Any, place: Place) -> Array:
    """A vector `[hidden_size]` that is finite in the stream's dtype."""
    # An entry may be the vector itself, so messages name the entry.
    return parse_vector(value, place.model, place.at.removesuffix(".vector"))


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


def parse_vector(raw: Any, model: "SteeredModel", at: str) -> Array:
    """Parse a vector `[hidden_size]` that is finite in the stream's dtype."""
    found = as_array(raw, at)
    if found.shape != (model.hidden_size,):
        raise fail(
            f"{at}: a vector of this model has {model.hidden_size} numbers, this one "
            f"has the shape {list(found.shape)}",
            at,
            list(found.shape),
        )
    return check_finite(found, model.dtype, at)


def check_finite(vector: Array, dtype: torch.dtype, at: str) -> Array:
    """The array itself, if it is finite in the model's dtype."""
    largest = float(np.abs(vector).max())
    # Comparisons with NaN are false too.
    if not largest <= torch.finfo(dtype).max:
        raise fail(
            f"{at}: the scaled vector must be finite in {dtype}; its largest "
            f"magnitude is {largest}",
            at,
            largest,
        )
    return vector


def has_no_numbers(raw: Any) -> bool:
    """Whether nested lists contain text or booleans, which NumPy might convert."""
    waiting = [raw]
    while waiting:
        here = waiting.pop()
        if isinstance(here, (str, bytes, bytearray, bool)):
            return True
        if isinstance(here, (list, tuple)):
            kinds = set(map(type, here))
            if not kinds <= {int, float}:
                waiting += here
        elif str(getattr(here, "dtype", "")).endswith("bool"):
            return True
    return False


def as_array(raw: Any, at: str) -> Array:
    """Convert real numbers, packed or not, to a contiguous float32 array."""
    if is_packed(raw):
        return unpack_array(raw, at)
    try:
        if isinstance(raw, torch.Tensor) and not raw.is_complex():
            raw = raw.detach().to("cpu", torch.float32).numpy()
        # NumPy would allocate the longest text's size for each element.
        if has_no_numbers(raw):
            raise TypeError("it must hold real numbers only")
        array = np.asarray(raw)
        if array.dtype.kind not in "fiu":
            raise TypeError("it must hold real numbers only")
        with np.errstate(over="ignore"):
            return np.ascontiguousarray(array, dtype=np.float32)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise fail(
            f"{at} must be a list of numbers, a numpy array or a tensor: {error}",
            at,
            type(raw).__name__,
        ) from None

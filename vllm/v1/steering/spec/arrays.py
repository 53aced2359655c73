# SPDX-License-Identifier: Apache-2.0
"""Arrays in entries: vectors, and the further arrays of some operations."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from vllm.v1.steering.errors import fail
from vllm.v1.steering.operations import OpName
from vllm.v1.steering.plan import Vector
from vllm.v1.steering.spec.packing import is_packed, unpack_array

MAX_RANK = 16
"""Most rows that `low_rank` reads and writes."""
PARALLEL = 1e-6
"""Axes of a plane are parallel if their unit vectors differ by less than this."""

Array = npt.NDArray[np.float32]


class Tensors(NamedTuple):
    """The arrays of an operation, float32."""

    main: Array  # [H], or [rows, H]
    others: Mapping[str, Array] = {}
    """Further arrays, by their names in the entry."""


def parse_tensors(
    entry: Mapping[str, Any], op: OpName, width: int, dtype: torch.dtype, at: str
) -> Tensors:
    """Parse the arrays of an entry whose keys are valid.

    Args:
        entry: as the user wrote it.
        op: the entry's operation.
        width: hidden size of the residual stream.
        dtype: dtype of the residual stream, in which the values must be finite.
        at: the entry's name in messages.

    Raises:
        SteeringValidationError: naming the parameter, the value and the remedy.

    """

    def rows(name: str, count: int | None = None) -> Array:
        return _matrix(entry[name], count, width, dtype, f"{at}.{name}")

    if op == "rotate":
        return Tensors(_orthonormal(rows("plane", 2), f"{at}.plane"))
    if op == "low_rank":
        return _low_rank(entry, rows("read"), width, dtype, at)
    if "vectors" in entry:
        vector = rows("vectors")
    else:
        vector = parse_vector(entry["vector"], width, dtype, at)
    if op == "swap":
        target = parse_vector(entry["target"], width, dtype, f"{at}.target")
        if not target.any():
            raise fail(f"{at}.target: a vector of zeros has no direction", at, "swap")
        return Tensors(vector, {"target": target})
    if entry.get("mask") is not None:
        mask = parse_vector(entry["mask"], width, dtype, f"{at}.mask")
        if not ((mask >= 0) & (mask <= 1)).all():
            value = float(mask[np.abs(mask - 0.5).argmax()])
            raise fail(f"{at}.mask must be between 0 and 1", f"{at}.mask", value)
        return Tensors(vector, {"mask": mask})
    return Tensors(vector)


def _low_rank(
    entry: Mapping[str, Any], read: Array, width: int, dtype: torch.dtype, at: str
) -> Tensors:
    rank = len(read)
    if rank > MAX_RANK:
        raise fail(
            f"{at}.read: at most {MAX_RANK} rows; split them over several entries",
            f"{at}.read",
            rank,
        )
    others = {"write": _matrix(entry["write"], rank, width, dtype, f"{at}.write")}
    for name in ("bias", "threshold"):
        if entry.get(name) is not None:
            others[name] = _numbers(entry[name], rank, f"{at}.{name}")
    return Tensors(read, others)


def _numbers(raw: Any, count: int, at: str) -> Array:
    found = as_array(raw, at)
    if found.shape != (count,) or not np.isfinite(found).all():
        raise fail(
            f"{at} must be {count} finite numbers, one for each row of read",
            at,
            list(found.shape),
        )
    return found


def _orthonormal(plane: Array, at: str) -> Array:
    """Orthonormal axes that span the plane; the first one keeps its direction."""
    wide = plane.astype(np.float64)
    lengths = np.linalg.norm(wide, axis=1)
    if not lengths.all():
        raise fail(f"{at}: an axis of zeros has no direction", at, lengths.tolist())
    first, second = wide / lengths[:, None]
    second = second - (second @ first) * first
    length = np.linalg.norm(second)
    if length < PARALLEL:
        raise fail(
            f"{at}: the two axes are parallel and span no plane; give two directions "
            "that differ",
            at,
            float(length),
        )
    return np.stack([first, second / length]).astype(np.float32)


def _matrix(
    raw: Any, count: int | None, width: int, dtype: torch.dtype, at: str
) -> Array:
    """A matrix `[count, width]`; with `count` None, of any number of rows above 0."""
    found = as_array(raw, at)
    right = found.ndim == 2 and len(found) and found.shape[1] == width
    if not right or (count is not None and len(found) != count):
        rows = "at least one row" if count is None else f"{count} rows"
        raise fail(
            f"{at} must be {rows} of {width} numbers, this model's hidden size; its "
            f"shape is {list(found.shape)}",
            at,
            list(found.shape),
        )
    return check_finite(found, dtype, at)


def parse_vector(raw: Any, width: int, dtype: torch.dtype, at: str) -> Vector:
    """Parse a vector `[width]`, float32, that is finite in the stream's dtype."""
    vector = as_array(raw, at)
    if vector.shape != (width,):
        raise fail(
            f"{at}: a vector of this model has {width} numbers, this one has the shape "
            f"{list(vector.shape)}",
            at,
            list(vector.shape),
        )
    return check_finite(vector, dtype, at)


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

# SPDX-License-Identifier: Apache-2.0
"""Reads objects that users write by a table: for each key its type and default.

The types are numbers, words and vectors; those of single operations are in `arrays.py`.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from vllm.v1.residual.bounds import shown
from vllm.v1.residual.numbers import is_float32
from vllm.v1.steering.errors import fail
from vllm.v1.steering.spec.packed import unpack_array

if TYPE_CHECKING:
    from vllm.v1.steering.spec.parse import SteeredModel

PACKED = frozenset({"dtype", "shape", "data"})
"""The keys of a packed array."""

Array = npt.NDArray[np.float32]
Values: TypeAlias = dict[str, Any]
"""What was read, by key."""


class Place(NamedTuple):
    """What a reader knows beside the value."""

    at: str
    """The key's name in messages."""
    model: "SteeredModel"
    values: Values
    """What was read before, in the order of the table."""


class Key(NamedTuple):
    """A key: how its value is checked, and what it is if it is left out."""

    read: Callable[[Any, Place], Any]
    default: Any = None
    """Also written out (as null, where it is None)."""


REQUIRED = object()
"""The default of a key that must be there."""

Table: TypeAlias = Mapping[str, Key]


def read(
    raw: Mapping[str, Any], table: Table, model: "SteeredModel", at: str
) -> Values:
    """The values of all keys of a table.

    Args:
        raw: as the user wrote it; the caller has checked that no other key is there,
            and that those that are required are.
        table: the keys, in the order in which they are read.
        model: the model that vectors must fit.
        at: the object's name in messages.

    Raises:
        SteeringValidationError: naming the parameter, the value and the remedy.

    """
    values: Values = {}
    for name, key in table.items():
        value = raw.get(name, key.default)
        if value is REQUIRED:
            continue  # Another key stands in its place.
        if value is not key.default:
            value = key.read(value, Place(f"{at}.{name}", model, values))
        values[name] = value
    return values


def as_written(value: Any, place: Place) -> Any:
    """The value itself, which is checked together with others."""
    return value


def finite(value: Any, at: str) -> float:
    """Parse a number that is finite in float32, the dtype in which kernels hold it.

    Raises:
        SteeringValidationError: the value is not a number, or not finite.

    """
    if not is_float32(value):
        raise fail(f"{at} must be a finite number, of float32", at, value)
    return float(value)


def number(value: Any, place: Place) -> float:
    """A number that is finite in float32."""
    return finite(value, place.at)


def flag(value: Any, place: Place) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise fail(f"{place.at} must be a boolean", place.at, value)
    return value


def one_of(known: Iterable[str]) -> Callable[[Any, Place], str]:
    """A reader of one of these words."""
    words = list(known)

    def read_word(value: Any, place: Place) -> str:
        if not isinstance(value, str) or value not in words:
            raise fail(
                f"{place.at}: {shown(value)} is not one of {words}", place.at, value
            )
        return value

    return read_word


def vector(value: Any, place: Place) -> Array:
    """A vector `[hidden_size]` that is finite in the stream's dtype."""
    # An entry may be the vector itself, so messages name the entry.
    return parse_vector(value, place.model, place.at.removesuffix(".vector"))


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


def is_packed(raw: Any) -> bool:
    """Whether a value is a packed array without other keys."""
    return isinstance(raw, Mapping) and raw.keys() == PACKED


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

# SPDX-License-Identifier: Apache-2.0
"""Reads objects that users write by a table: for each key its type and default."""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from vllm.v1.residual.bounds import shown
from vllm.v1.residual.numbers import is_float32
from vllm.v1.steering.errors import fail

if TYPE_CHECKING:
    from vllm.v1.steering.spec.parse import SteeredModel

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

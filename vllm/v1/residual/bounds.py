# SPDX-License-Identifier: Apache-2.0
"""Bounds on the size of clients' input, and on how much of it error messages show."""

import reprlib
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

MAX_MESSAGE = 1000
"""Maximum number of characters of an error message of ours."""

MAX_RESPONSE_MESSAGE = 8192
"""The same of any error in an HTTP response, upstream's messages included."""

MAX_SANITIZED = 4 * MAX_RESPONSE_MESSAGE
"""Characters of a message that are searched for paths before it is shortened."""

_LISTED = 16

E = TypeVar("E", bound=Exception)

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
_SHORT.maxdict = _SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxset = 6
_SHORT.maxlevel = 3


def shown(value: Any) -> str:
    """A shortened `repr` for a message."""
    try:
        return _SHORT.repr(value)
    except Exception:  # An int too long to print, or a failing `__repr__`.
        return f"<{type(value).__name__}>"


def listed(names: Collection[Any]) -> str:
    """Names for a message: the first in sorted order, and the number of others."""
    first = [shown(name) for name in sorted(names)[:_LISTED]]
    more = len(names) - len(first)
    return f"[{', '.join(first)}]" + (f" and {more} more" if more else "")


def counted(number: int, noun: str) -> str:
    """A number with its noun, such as "1 token" or "2 tokens"."""
    return f"{number} {noun}{'s' * (number != 1)}"


def cut(message: str, most: int = MAX_MESSAGE) -> str:
    """Shorten a message in the middle; its end contains the remedy."""
    if len(message) <= most:
        return message
    return f"{message[: most - 305]} ... {message[-300:]}"


def failing(error: Callable[..., E]) -> Callable[[str, str, Any], E]:
    """A function that makes errors, with long texts and values shortened.

    Args:
        error: their class, whose objects name a parameter and a value.

    Returns:
        `fail(message, parameter, value)`.

    """

    def fail(message: str, parameter: str, value: Any) -> E:
        return error(cut(message), parameter=cut(parameter), value=shown(value))

    return fail


def count_values(raw: Any, most: int) -> int:
    """Count the values in nested lists and dicts, until there are more than `most`.

    A list that begins and ends with a number is assumed to contain only numbers.
    """
    total = 0
    waiting = [raw]
    while waiting and total <= most:
        here = waiting.pop()
        if isinstance(here, Mapping):
            total += len(here)
            inner = list(here.values()) if total <= most else []
        elif isinstance(here, (list, tuple)) and here:
            total += len(here)
            numbers = {type(here[0]), type(here[-1])} <= {int, float}
            inner = [] if numbers or total > most else list(here)
        else:
            continue
        waiting += [one for one in inner if isinstance(one, (Mapping, list, tuple))]
    return total

# SPDX-License-Identifier: Apache-2.0
"""What a client sends, bounded: how much of it there is, and how much is told of it."""

import reprlib
from collections.abc import Collection, Mapping
from typing import Any

MAX_MESSAGE = 1000
"""Characters of an error's message."""

_LISTED = 16

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
_SHORT.maxdict = _SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxset = 6
_SHORT.maxlevel = 3


def shown(value: Any) -> str:
    """A value for a message: what it begins with."""
    try:
        return _SHORT.repr(value)
    except Exception:  # A number too long to be written, a `repr` of a user's class.
        return f"<{type(value).__name__}>"


def listed(names: Collection[Any]) -> str:
    """Names for a message: the first ones, and how many more there are."""
    first = [shown(name) for name in sorted(names)[:_LISTED]]
    more = len(names) - len(first)
    return f"[{', '.join(first)}]" + (f" and {more} more" if more else "")


def cut(message: str) -> str:
    """A message that is not too long; its end, the remedy, stays."""
    if len(message) <= MAX_MESSAGE:
        return message
    return f"{message[: MAX_MESSAGE - 305]} ... {message[-300:]}"


def count_values(raw: Any, most: int) -> int:
    """How many values there are in lists and objects; more than `most` are not counted.

    A list that begins and ends with a number is taken for a list of numbers.
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

# SPDX-License-Identifier: Apache-2.0
"""Parses JSON bodies, whose size and number of parts are bounded.

`msgspec` parses a million numbers in 0.2 s, and holds the interpreter meanwhile. What
would take longer is refused before, by the number of signs outside of texts. Numbers
near the ends of float64's range, or with hundreds of digits, take it 10 us each instead
of 0.03: Python's own conversion, which lets other threads run, reads them in 0.4.
"""

import json
import os
import re
from dataclasses import dataclass
from math import isinf
from typing import Any

import msgspec

from vllm.v1.residual.plain_data import unique_object


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Limits of one body."""

    num_bytes: int = 64 << 20
    depth: int = 64
    """Nesting depth of lists and objects."""
    containers: int = 1 << 16
    """Number of lists and objects."""
    strings: int = 1 << 17
    """Number of strings, keys included; enough for a batch of prompts."""
    values: int = 1 << 20
    """Number of values in total; larger vectors must be sent packed."""


def _from_environment() -> BodyLimits:
    given = os.environ.get("VLLM_MAX_BODY_BYTES", "")
    return BodyLimits(num_bytes=int(given)) if given else BodyLimits()


LIMITS = _from_environment()

INLINE_BYTES = 1 << 16
"""Bodies up to this size are parsed on the event loop, in about a millisecond."""


class BodyError(ValueError):
    """A body is rejected; the message says why and what to send instead."""


def too_large(limits: BodyLimits) -> str:
    """The error message for a body with too many bytes."""
    return (
        f"it is larger than {limits.num_bytes} bytes; send vectors packed (base64), or "
        "in several requests. VLLM_MAX_BODY_BYTES of the server sets the limit"
    )


_HIGH, _LOW = rb"\\u[dD][89abAB][0-9a-fA-F][0-9a-fA-F]", rb"\\u[dD][c-fC-F]"
_LONE_SURROGATE = re.compile(_HIGH + b"(?!" + _LOW + b")|(?<!" + _HIGH + b")" + _LOW)
"""An escape of half a character."""
END_BYTES = 16
"""Within so many from the end, the parser calls half a character truncated input."""
_LONG_EXPONENT = re.compile(rb"[eE][+-]?[0-9]{3}")
PIECE_BYTES = 1 << 18
"""What is searched at a time, in some 5 ms; then other threads may run."""
USUAL_CHARACTERS = 27
"""Of a float64 as Python writes it, with a comma and a blank."""


def read_json(raw: bytes, limits: BodyLimits = LIMITS) -> Any:
    """Parse a body.

    Args:
        raw: JSON in UTF-8, UTF-16 or UTF-32.
        limits: bounds on the size and number of its parts.

    Raises:
        BodyError: the body exceeds a limit, is not JSON, or has a key twice in one
            object, or an integer of more than 64 bits.

    """
    if len(raw) > limits.num_bytes:
        raise BodyError(too_large(limits))
    try:
        encoding = json.detect_encoding(raw)
        raw = raw if encoding == "utf-8" else raw.decode(encoding).encode()
        signs = _outside_of_texts(raw, limits)
        opened = signs.count(b"[") + signs.count(b"{")
        _check("lists and objects", opened, limits.containers)
        _check("values", signs.count(b",") + opened, limits.values)
        num_names = signs.count(b":")
        hook = _to_float if _has_slow_numbers(signs, limits) else None
        found = msgspec.json.Decoder(float_hook=hook).decode(raw)
        if _count_names(found, limits) != num_names:
            # The parser keeps the last of equal keys. This one names the key.
            json.loads(raw, object_pairs_hook=unique_object)
    except RecursionError:
        raise BodyError(_too_many("nested lists and objects", limits.depth)) from None
    except (UnicodeError, msgspec.DecodeError) as error:
        at_end = _LONE_SURROGATE.search(raw, max(len(raw) - END_BYTES, 0))
        if at_end or "surrogate" in str(error):
            raise BodyError("a text has a lone surrogate, half a character") from None
        raise BodyError(f"it is not JSON: {error}") from None
    except ValueError as error:
        raise BodyError(str(error)) from None
    return found


def _outside_of_texts(raw: bytes, limits: BodyLimits) -> bytes:
    """What is not between quotes, if `raw` is JSON."""
    if b"\\" in raw:
        # In this order: a quote behind two backslashes ends its text.
        raw = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    _check("texts and names", raw.count(b'"') // 2, limits.strings)
    return b"".join(raw.split(b'"')[::2])


def _has_slow_numbers(signs: bytes, limits: BodyLimits) -> bool:
    """Whether `msgspec` may take long for a number; `signs` are outside of texts."""
    values = signs.count(b",") + 1
    is_long = len(signs) > USUAL_CHARACTERS * values + limits.containers
    return is_long or _has_long_exponent(signs)


def _to_float(digits: str) -> float:
    """Convert in Python's code, between which threads take turns, unlike in `float`."""
    if isinf(number := float(digits)):
        raise ValueError("Number out of range")
    return number


def _has_long_exponent(signs: bytes) -> bool:
    """Whether a number has an exponent of three digits; searched in pieces."""
    return any(
        # With what a match that begins in this piece has in the next one.
        _LONG_EXPONENT.search(signs, start, start + PIECE_BYTES + 4)
        for start in range(0, len(signs), PIECE_BYTES)
    )


def _count_names(found: Any, limits: BodyLimits) -> int:
    """The number of names in all objects, of which none is twice in one.

    Raises:
        BodyError: lists and objects are nested too deeply, or an integer has more than
            64 bits, which the message to the engine cannot carry.

    """
    names = depth = 0
    values = [found]
    while values:
        inner: list[Any] = []
        is_nested = False
        for value in values:
            if isinstance(value, dict):
                names += len(value)
                inner += value.values()
                is_nested = True
            elif isinstance(value, list):
                inner += value
                is_nested = True
            elif type(value) is int and not -(1 << 63) <= value < 1 << 64:
                raise BodyError(
                    "it has an integer of more than 64 bits; send a number with an "
                    "exponent, such as 1e30, or text"
                )
        depth += is_nested
        _check("nested lists and objects", depth, limits.depth)
        values = inner
    return names


def _check(what: str, count: int, most: int) -> None:
    if count > most:
        raise BodyError(_too_many(what, most))


def _too_many(what: str, most: int) -> str:
    return (
        f"it has more than {most} {what}; send vectors packed (base64), positions and "
        "layers as ranges, or several requests"
    )

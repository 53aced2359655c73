# SPDX-License-Identifier: Apache-2.0
"""Scans the structure of a JSON body and checks it against limits before parsing."""

import os
from dataclasses import dataclass
from time import sleep

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Limits of one body. Long lists of numbers and long strings are cheap to parse."""

    num_bytes: int = 64 << 20
    depth: int = 64
    """Nesting depth of lists and objects."""
    containers: int = 1 << 16
    """Number of lists and objects."""
    strings: int = 1 << 17
    """Number of strings, keys included; enough for a batch of prompts."""
    values: int = 1 << 20
    """Number of values in total; larger vectors must be sent packed."""
    loose_values: int = 1 << 17
    """Number of values outside lists with more than `SHORT` values."""
    loose_bytes: int = 8 << 20
    """Bytes outside such lists and outside strings longer than `SHORT_TEXT` bytes."""


def _from_environment() -> BodyLimits:
    given = os.environ.get("VLLM_MAX_BODY_BYTES", "")
    return BodyLimits(num_bytes=int(given)) if given else BodyLimits()


LIMITS = _from_environment()

_MOMENT = 5e-5
"""Seconds: long enough for a thread that waits to wake."""
_SLAB = 1 << 18
_QUOTE, _BACKSLASH = 0x22, 0x5C
COMMA, OPEN_LIST, CLOSE_LIST, _OPEN, _CLOSE = 1, 2, 3, 4, 5
_KINDS: npt.NDArray[np.uint8] = np.zeros(256, dtype=np.uint8)
for _sign, _kind in zip(b",[]{}", range(1, 6), strict=True):
    _KINDS[_sign] = _kind


class BodyError(ValueError):
    """A body is rejected; the message says why and what to send instead."""


def too_large(limits: BodyLimits) -> str:
    """The error message for a body with too many bytes."""
    return (
        f"it is larger than {limits.num_bytes} bytes; send vectors packed (base64), or "
        "in several requests. VLLM_MAX_BODY_BYTES of the server sets the limit"
    )


@dataclass(frozen=True, slots=True)
class Structure:
    """Byte offsets of structural characters in a body."""

    signs: npt.NDArray[np.int64]
    """Offsets of commas and brackets outside strings."""
    kinds: npt.NDArray[np.uint8]
    """Which character is at each of `signs`."""
    quotes: npt.NDArray[np.int64]
    """Offsets of opening and closing quotes, alternating."""


def scanned(raw: bytes, limits: BodyLimits) -> Structure:
    """Scan the structure of a body in slabs of 1 MiB.

    Raises:
        BodyError: the body exceeds a limit.

    """
    data = np.frombuffer(raw, dtype=np.uint8)
    signs, kinds, quotes = [], [], []
    strings = values = containers = depth = 0
    run = 0  # Backslashes directly before the slab.
    for start in range(0, len(data), _SLAB):
        let_others_run()
        slab = data[start : start + _SLAB]
        marks, run = _quotes(slab, run)
        found = np.flatnonzero(_KINDS[slab])
        found = found[(np.searchsorted(marks, found) + strings) & 1 == 0]
        kind = _KINDS[slab[found]]
        opens = (kind == OPEN_LIST) | (kind == _OPEN)
        depths = depth + np.cumsum(opens * 2 - (kind != COMMA).astype(np.int64))
        strings += len(marks)
        containers += int(opens.sum())
        values += int((kind == COMMA).sum()) + int(opens.sum())
        check_count("nested lists and objects", depths.max(initial=0), limits.depth)
        check_count("lists and objects", containers, limits.containers)
        check_count("texts and names", strings // 2, limits.strings)
        check_count("values", values, limits.values)
        depth = int(depths[-1]) if len(depths) else depth
        signs.append(found + start)
        kinds.append(kind)
        quotes.append(marks + start)
    together = map(np.concatenate, (signs, kinds, quotes))
    return Structure(*together)


def let_others_run() -> None:
    """Give the interpreter to a thread that waits for it, for a moment.

    Otherwise one that waits gets it after `sys.getswitchinterval()`, 5 ms, and an
    event loop needs it many times for each small request.
    """
    sleep(_MOMENT)


def check_count(what: str, count: int, most: int) -> None:
    """Check a count against its limit.

    Raises:
        BodyError: `count` exceeds `most`; the message names `what`.

    """
    if count > most:
        raise BodyError(
            f"it has more than {most} {what}; send vectors packed (base64), positions "
            "and layers as ranges, or several requests"
        )


def _quotes(slab: npt.NDArray[np.uint8], run: int) -> tuple[npt.NDArray[np.int64], int]:
    """Find the unescaped quotes in a slab.

    Args:
        slab: a part of a body.
        run: the number of backslashes directly before the slab.

    Returns:
        Offsets of the quotes, and the number of backslashes at the end of the slab.

    """
    quotes = np.flatnonzero(slab == _QUOTE)
    others = np.flatnonzero(slab != _BACKSLASH)
    if len(others) == len(slab) and not run % 2:
        return quotes, 0
    # The last byte before each quote that is not a backslash, else -1 - run.
    before = np.concatenate(([-1 - run], others))[np.searchsorted(others, quotes)]
    escaped = (quotes - 1 - before) & 1
    last = int(others[-1]) if len(others) else -1 - run
    return quotes[escaped == 0], len(slab) - 1 - last

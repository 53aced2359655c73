# SPDX-License-Identifier: Apache-2.0
"""One entry of a request's steering: a vector, and what to do with it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm.v1.residual.bounds import shown
from vllm.v1.steering.errors import fail
from vllm.v1.steering.operations import OP_NAMES, Operation, OpName, operation
from vllm.v1.steering.plan import Tap, Vector
from vllm.v1.steering.positions import Spans, spans_of

KEYS = ("vector", "scale", "op", "min", "max", "norm_match", "positions")
MAX_POSITIONS = 65536
"""Of a list. Many that follow one another cost as little as one."""
FARTHEST = 2**31
"""No position is farther from the start, or from the end, of a prompt."""


@dataclass(frozen=True, slots=True)
class VectorUse:
    """How a vector acts, apart from the plain addition."""

    op: OpName = "add"
    low: float | None = None
    high: float | None = None
    norm_match: bool = False
    positions: Spans | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it is the addition at every token, which tables carry out."""
        return self == PLAIN

    def operation(self, tap: Tap, vector: Vector, scale: float, at: str) -> Operation:
        """The operation at a tap.

        Raises:
            SteeringValidationError: the vector is zero where a direction is needed.

        """
        if (self.norm_match or self.op in ("project_out", "clamp")) and (
            not vector.any()
        ):
            raise fail(
                f"{at}: a vector of zeros has no direction, which "
                f"{'norm_match' if self.norm_match else self.op} needs",
                at,
                self.op,
            )
        return operation(
            tap,
            self.op,
            vector,
            scale,
            (self.low, self.high),
            self.norm_match,
            self.positions,
        )


PLAIN = VectorUse()


def parse_manner(entry: Mapping[str, Any], at: str) -> VectorUse:
    """How `{"vector", "scale"?, "op"?, "min"?, ...}` acts.

    Raises:
        SteeringValidationError: naming the parameter, the value and the remedy.

    """
    unknown = sorted(str(name) for name in entry if name not in KEYS)
    if unknown or "vector" not in entry:
        raise fail(
            f"{at}: an entry is a vector, or an object with the keys {list(KEYS)}; "
            + (
                f"it has no key {shown(unknown[0])}" if unknown else "vector is missing"
            ),
            at,
            sorted(map(str, entry)),
        )
    op = entry.get("op", "add")
    if not isinstance(op, str) or op not in OP_NAMES:
        raise fail(
            f"{at}.op: {shown(op)} is not one of {list(OP_NAMES)}", f"{at}.op", op
        )
    low, high = (_bound(entry.get(name), f"{at}.{name}") for name in ("min", "max"))
    _check_bounds(op, low, high, "scale" in entry, at)
    norm_match = entry.get("norm_match", False)
    if not isinstance(norm_match, bool) or (norm_match and op not in _MATCHES):
        raise fail(
            f"{at}.norm_match is true or false, and goes with {list(_MATCHES)}",
            f"{at}.norm_match",
            norm_match,
        )
    positions = parse_positions(entry.get("positions"), f"{at}.positions")
    return VectorUse(op, low, high, norm_match, positions)


_MATCHES = ("add", "replace")


def _bound(raw: Any, at: str) -> float | None:
    if raw is None:
        return None
    if not is_finite(raw):
        raise fail(f"{at} must be a finite number", at, raw)
    return float(raw)


def is_finite(value: Any) -> bool:
    """Whether it is a number, and one that a float can hold."""
    if not isinstance(value, (int, float, np.number)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except (OverflowError, TypeError):
        return False


def _check_bounds(
    op: str, low: float | None, high: float | None, has_scale: bool, at: str
) -> None:
    given = low is not None or high is not None
    if op != "clamp":
        if given:
            raise fail(f'{at}: min and max go with "op": "clamp"', at, op)
        return
    if not given or has_scale or (low is not None and high is not None and low > high):
        raise fail(
            f"{at}: clamp needs min or max, min not above max, and takes no scale",
            at,
            {"min": low, "max": high},
        )


def parse_positions(raw: Any, at: str) -> Spans | None:
    """A list of positions, negative ones from the prompt's end, or `{"last": k}`.

    Raises:
        SteeringValidationError: it is neither, or empty.

    """
    if raw is None:
        return None
    if isinstance(raw, Mapping):
        given = raw.get("last")
        last = int(given) if given is not None and _is_index(given) else 0
        if raw.keys() != {"last"} or last < 1:
            raise fail(f'{at} must be a list or {{"last": k}}', at, raw)
        return ((-last, 0),)
    if isinstance(raw, (list, tuple)) and len(raw) > MAX_POSITIONS:
        raise fail(f"{at}: at most {MAX_POSITIONS} positions", at, len(raw))
    if not isinstance(raw, (list, tuple)) or not raw or not all(map(_is_index, raw)):
        raise fail(
            f"{at} must list at least one token position (negative ones count from "
            'the prompt\'s end), or be {"last": k} for the last k prompt tokens',
            at,
            raw,
        )
    return spans_of(raw)


def _is_index(value: Any) -> bool:
    is_integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    return is_integer and -FARTHEST <= value < FARTHEST

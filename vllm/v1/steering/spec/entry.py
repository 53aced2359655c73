# SPDX-License-Identifier: Apache-2.0
"""One steering entry: a vector and an operation with its parameters."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.v1.residual import selectors
from vllm.v1.residual.bounds import shown
from vllm.v1.residual.numbers import is_float32
from vllm.v1.residual.spans import NAMED, Spans
from vllm.v1.residual.tap import Tap
from vllm.v1.steering.conditions import Condition
from vllm.v1.steering.errors import fail
from vllm.v1.steering.features import FeatureUse
from vllm.v1.steering.operations import (
    OP_NAMES,
    Details,
    Operation,
    OpName,
    operation,
    packed_arrays,
)
from vllm.v1.steering.spec.arrays import Tensors

COMMON = ("op", "positions", "when")
KEYS_OF: dict[OpName, tuple[str, ...]] = {
    "replace": ("vector", "vectors", "scale", "norm_match", "alpha", "mask"),
    "add": ("vector", "vectors", "scale", "norm_match"),
    "project_out": ("vector", "vectors", "scale"),
    "swap": ("vector", "target"),
    "rotate": ("plane", "degrees"),
    "low_rank": (
        "read",
        "write",
        "bias",
        "activation",
        "threshold",
        "min",
        "max",
        "scale",
    ),
    "feature": ("sae", "feature", "value", "mode", "only_if_active"),
    "clamp": ("vector", "vectors", "min", "max", "value", "strength"),
}
"""The keys that an entry may have in addition to `COMMON`, by operation."""
NEEDED: dict[OpName, tuple[str, ...]] = {
    "swap": ("vector", "target"),
    "rotate": ("plane", "degrees"),
    "low_rank": ("read", "write"),
    "feature": ("sae", "feature", "value"),
}
"""The keys that an entry must have, for operations that need more than a vector."""
KEYS = tuple(dict.fromkeys(sum(KEYS_OF.values(), COMMON)))
ACTIVATIONS = ("identity", "relu", "jumprelu", "step", "clip")
ALL_GENERATED = "all_generated"
"""The selector of all generated tokens; its entries move to the decode tier."""


"""The largest number."""


@dataclass(frozen=True, slots=True)
class VectorUse:
    """The operation of an entry and its parameters."""

    op: OpName = "add"
    low: float | None = None
    high: float | None = None
    norm_match: bool = False
    positions: Spans | None = None
    strength: float = 1.0
    alpha: float = 1.0
    degrees: float = 0.0
    activation: str = "identity"
    when: Condition | None = None
    feature: FeatureUse | None = None
    num_rows: int = 0
    """Number of positions that have a vector of their own; 0 if they share one."""

    @property
    def is_plain(self) -> bool:
        """Whether this is a plain addition at every token, which tables perform."""
        return self == PLAIN

    def operation(self, tap: Tap, tensors: Tensors, scale: float, at: str) -> Operation:
        """Create the operation at a tap.

        Raises:
            SteeringValidationError: the vector is zero but the operation needs a
                direction.

        """
        directed = self.norm_match or self.op in ("project_out", "clamp", "swap")
        if directed and not tensors.main.any(axis=-1).all():
            raise fail(
                f"{at}: a vector of zeros has no direction, which "
                f"{'norm_match' if self.norm_match else self.op} needs",
                at,
                self.op,
            )
        return operation(
            tap,
            self.op,
            tensors.main,
            scale,
            (self.low, self.high),
            self.norm_match,
            self.positions,
            Details(
                self.strength,
                self.alpha,
                self.degrees,
                self.activation,
                packed_arrays(tensors.others),
                self.when,
                self.feature,
            ),
            self.num_rows,
        )


PLAIN = VectorUse()


def parse_use(entry: Mapping[str, Any], at: str) -> VectorUse:
    """Parse the operation and parameters of `{"vector", "scale"?, "op"?, "min"?, ...}`.

    Raises:
        SteeringValidationError: naming the parameter, the value and the remedy.

    """
    op = _op(entry, at)
    low, high = (_bound(entry.get(name), f"{at}.{name}") for name in ("min", "max"))
    if op == "clamp" and entry.get("value") is not None:
        low, high = _one_bound(entry, at)
    activation = _activation(entry, at)
    _check_bounds(op, low, high, activation, at)
    norm_match = entry.get("norm_match", False)
    if not isinstance(norm_match, bool):
        raise fail(f"{at}.norm_match must be a boolean", f"{at}.norm_match", norm_match)
    return VectorUse(
        op,
        low,
        high,
        norm_match,
        # The positions of a matrix follow the order of its rows; `matrix.py` parses
        # them.
        None
        if "vectors" in entry
        else parse_positions(entry.get("positions"), f"{at}.positions"),
        _number(entry, "strength", 1.0, at),
        _number(entry, "alpha", 1.0, at),
        _number(entry, "degrees", 0.0, at),
        activation,
    )


def _op(entry: Mapping[str, Any], at: str) -> OpName:
    """The entry's operation, after a check that all keys belong to it."""
    op = entry.get("op", "add")
    if not isinstance(op, str) or op not in KEYS_OF:
        raise fail(
            f"{at}.op: {shown(op)} is not one of {list(OP_NAMES)}", f"{at}.op", op
        )
    unknown = sorted(str(name) for name in entry if name not in KEYS)
    needed = NEEDED.get(op, ("vectors",) if "vectors" in entry else ("vector",))
    missing = [name for name in needed if name not in entry]
    if unknown or missing:
        keys = [*KEYS_OF[op], *COMMON]
        raise fail(
            f'{at}: an entry is a vector, or an object, with "op": "{op}" of the keys '
            f"{keys}; "
            + (_refused_key(unknown[0]) if unknown else f"{missing[0]} is missing"),
            at,
            sorted(map(str, entry)),
        )
    if "vector" in entry and "vectors" in entry:
        raise fail(
            f"{at}: vector acts at all positions of an entry, vectors has a row for "
            "each; leave one of them out",
            at,
            sorted(map(str, entry)),
        )
    if op == "clamp" and "scale" in entry:
        raise fail(
            f"{at}: clamp takes no scale; use strength, the fraction of the distance "
            "to "
            "the bounds",
            at,
            entry["scale"],
        )
    for name in entry:
        if name not in KEYS_OF[op] and name not in COMMON:
            goes = [other for other, keys in KEYS_OF.items() if name in keys]
            raise fail(
                f'{at}.{name} goes with "op" {" or ".join(goes)}, not with {op}',
                f"{at}.{name}",
                op,
            )
    return op


def _refused_key(name: str) -> str:
    if name == "from":
        return 'rows of another run are not read by "from": send them as vectors'
    return f"it has no key {shown(name)}"


def _number(entry: Mapping[str, Any], name: str, default: float, at: str) -> float:
    return finite(entry.get(name, default), f"{at}.{name}")


def _one_bound(entry: Mapping[str, Any], at: str) -> tuple[float, float]:
    """The bounds of a clamp with a `value`, which are equal."""
    if entry.get("min") is not None or entry.get("max") is not None:
        raise fail(
            f"{at}: value sets both min and max; give either value, or min and max",
            f"{at}.value",
            entry["value"],
        )
    value = _number(entry, "value", 0.0, at)
    return value, value


def _activation(entry: Mapping[str, Any], at: str) -> str:
    found = entry.get("activation", "identity")
    if not isinstance(found, str) or found not in ACTIVATIONS:
        raise fail(
            f"{at}.activation: {shown(found)} is not one of {list(ACTIVATIONS)}",
            f"{at}.activation",
            found,
        )
    has_threshold = entry.get("threshold") is not None
    if has_threshold != (found == "jumprelu") and not (
        has_threshold and found == "step"
    ):
        raise fail(
            f"{at}: jumprelu needs a threshold, step may have one, and no other "
            "activation has",
            f"{at}.threshold",
            found,
        )
    return found


def _bound(raw: Any, at: str) -> float | None:
    return None if raw is None else finite(raw, at)


def finite(value: Any, at: str) -> float:
    """Parse a number that is finite in float32, the dtype in which kernels hold it.

    Raises:
        SteeringValidationError: the value is not a number, or not finite.

    """
    if not is_float32(value):
        raise fail(f"{at} must be a finite number, of float32", at, value)
    return float(value)


def _check_bounds(
    op: str, low: float | None, high: float | None, activation: str, at: str
) -> None:
    given = low is not None or high is not None
    if given != (op == "clamp" or activation == "clip"):
        raise fail(
            f"{at}: clamp needs min or max, or a value; clip needs min or max, and no "
            "other activation has them",
            at,
            {"min": low, "max": high},
        )
    if low is not None and high is not None and low > high:
        raise fail(f"{at}: min must not be above max", at, {"min": low, "max": high})


def parse_positions(raw: Any, at: str) -> Spans | None:
    """Parse the positions of an entry; None for every token of its tier.

    Args:
        raw: a selector of `vllm.v1.residual.selectors`, or None.
        at: the selector's name in messages.

    Raises:
        SteeringValidationError: it is not a selector, or selects tokens that are only
            known after they are computed.

    """
    if raw is None:
        return None
    found = selectors.parse_positions(raw, at, fail)
    if not isinstance(found, str):
        return found
    if found == "last_generated":
        raise fail(
            f"{at}: the last generated token is not known in advance; give "
            "its position, or capture it instead",
            at,
            raw,
        )
    if found == ALL_GENERATED:
        raise fail(
            f"{at}: the number of generated tokens is not known in advance; list the "
            "positions of the rows",
            at,
            raw,
        )
    return NAMED[found]

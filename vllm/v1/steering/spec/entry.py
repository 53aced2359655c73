# SPDX-License-Identifier: Apache-2.0
"""One steering entry: an operation, its vectors and its parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from vllm.v1.residual.bounds import shown
from vllm.v1.residual.heads import parse_heads
from vllm.v1.residual.spans import Spans
from vllm.v1.residual.tap import INNER_POINTS, PointShape, Tap, shape_of
from vllm.v1.steering.errors import fail
from vllm.v1.steering.features import MODES
from vllm.v1.steering.plan import (
    OP_NAMES,
    Details,
    Operation,
    OpName,
    Vector,
    operation,
)
from vllm.v1.steering.spec.arrays import (
    direction,
    plane,
    read_rows,
    row_numbers,
    rows,
    shares,
    vector_or_number,
    write_rows,
)
from vllm.v1.steering.spec.feature import parse_feature
from vllm.v1.steering.spec.matrix import (
    Rows,
    parse_positions,
    row_positions,
    without_zeros,
)
from vllm.v1.steering.spec.sources import with_rows
from vllm.v1.steering.spec.table import (
    REQUIRED,
    Array,
    Key,
    Table,
    Values,
    as_written,
    check_finite,
    flag,
    number,
    one_of,
    read,
    vector,
)
from vllm.v1.steering.spec.when import check_known, parse_when

if TYPE_CHECKING:
    from vllm.v1.steering.spec.parse import SteeredModel


WIDE = ("vector", "vectors", "plane", "read", "target", "mask", "write")
"""Keys of an entry whose arrays are as wide as the row."""


class Heads:
    """Some heads of the rows of a hook point."""

    def __init__(self, numbers: Sequence[int], shape: PointShape) -> None:
        size = shape.head_size
        self._width = shape.width
        self._places = np.concatenate(
            [np.arange(number * size, (number + 1) * size) for number in numbers]
        )

    @property
    def width(self) -> int:
        """Numbers of these heads together."""
        return len(self._places)

    def cut(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """An entry with vectors of these heads only, where they are whole rows."""
        return {
            key: value[..., self._places]
            if key in VECTORS and value.shape[-1] == self._width
            else value
            for key, value in entry.items()
        }

    def spread(self, values: Mapping[str, Any], op: str) -> dict[str, Any]:
        """Arrays of the heads as arrays of whole rows, with zeros for the others.

        A direction that is zero outside of the heads changes nothing there, whatever
        the operation, except that `replace` needs a mask.
        """
        made = dict(values)
        if op == "replace" and made.get("mask") is None:
            made["mask"] = np.ones(self.width, np.float32)
        for name in WIDE:
            if made.get(name) is not None:
                made[name] = self._whole(made[name])
        return made

    def _whole(self, part: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        whole = np.zeros((*part.shape[:-1], self._width), np.float32)
        whole[..., self._places] = part
        return whole


def heads_of_entry(
    raw: Mapping[str, Any], tap: Tap, model: "SteeredModel", at: str
) -> "tuple[Heads | None, SteeredModel]":
    """The heads of an entry, and the model with the width that its vectors must have.

    Args:
        raw: the entry; without the key `heads` it acts on whole rows.
        tap: where it acts.
        model: the model.
        at: the entry's name in messages.

    Raises:
        SteeringValidationError: rows have no such heads, or the operation needs more.

    """
    shape = shape_of(model.shapes, tap, model.hidden_size)
    if raw.get("heads") is None:
        if shape.width == model.hidden_size:
            return None, model
        return None, replace(model, hidden_size=shape.width)
    where = f"{at}.heads"
    numbers = parse_heads(raw["heads"], tap, shape, where, fail)
    if raw.get("norm_match"):
        raise fail(
            f"{where}: norm_match scales by the norm of the whole row; leave one of "
            "the two out",
            where,
            numbers,
        )
    heads = Heads(numbers, shape)
    return heads, replace(model, hidden_size=heads.width)


ACTIVATIONS = ("identity", "relu", "jumprelu", "step", "clip")
COMMON = ("op", "positions", "when", "heads")
"""The keys of all entries, which are parsed beside those of its operation."""
VECTORS: Table = {"vector": Key(vector, REQUIRED), "vectors": Key(rows, REQUIRED)}
"""A vector for all positions of the entry, or one for each: one of the two."""
SCALE = Key(number, 1.0)
BOUNDS: Table = {"min": Key(number), "max": Key(number)}
OPS: dict[OpName, Table] = {
    "replace": {
        **VECTORS,
        "vector": Key(vector_or_number, REQUIRED),
        "from": Key(as_written),
        "scale": SCALE,
        "norm_match": Key(flag, False),
        "alpha": Key(number, 1.0),
        "mask": Key(shares),
    },
    "add": {**VECTORS, "scale": SCALE, "norm_match": Key(flag, False)},
    "project_out": {**VECTORS, "scale": SCALE},
    "swap": {"vector": Key(vector, REQUIRED), "target": Key(direction, REQUIRED)},
    "rotate": {"plane": Key(plane, REQUIRED), "degrees": Key(number, REQUIRED)},
    "low_rank": {
        "read": Key(read_rows, REQUIRED),
        "write": Key(write_rows, REQUIRED),
        "bias": Key(row_numbers),
        "activation": Key(one_of(ACTIVATIONS), "identity"),
        "threshold": Key(row_numbers),
        **BOUNDS,
        "scale": SCALE,
    },
    "feature": {
        "sae": Key(as_written, REQUIRED),
        "feature": Key(as_written, REQUIRED),
        "value": Key(number, REQUIRED),
        "mode": Key(one_of(MODES), "set"),
        "only_if_active": Key(flag, False),
    },
    "clamp": {
        **VECTORS,
        **BOUNDS,
        "value": Key(number),
        "strength": Key(number, 1.0),
    },
}
"""The keys that an entry may have in addition to `COMMON`, by operation."""
KEYS = tuple(
    dict.fromkeys([*COMMON, *(key for table in OPS.values() for key in table)])
)
MAIN = ("vector", "vectors", "plane", "read")
"""The keys of an operation's own vectors, of which it has one."""
OTHERS = ("target", "mask", "write", "bias", "threshold")
"""The keys of further arrays."""
NO_VECTOR = np.zeros(0, dtype=np.float32)
"""The vector of an operation that has none of its own."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One parsed entry."""

    tap: Tap
    op: OpName
    main: Array
    """The unscaled vector `[hidden_size]`, or rows of such."""
    scale: float
    low: float | None
    high: float | None
    norm_match: bool
    positions: Spans | None
    """Where it acts; None for every token, and for a matrix."""
    details: Details
    rows: Rows = ()
    """Of a matrix with a row for each position: the positions of rows, by index."""

    @property
    def vector(self) -> Vector:
        """The unscaled vector; of several rows, the first."""
        return self.main if self.main.ndim == 1 else self.main[0]

    @property
    def only_adds(self) -> bool:
        """Whether this is an addition of one vector at every token."""
        other = self.norm_match or self.rows or self.details.when is not None
        return self.op == "add" and self.positions is None and not other

    @property
    def is_plain(self) -> bool:
        """Whether tables perform this: a plain addition to the stream."""
        return self.only_adds and self.tap[1] not in INNER_POINTS

    def scaled(self, model: "SteeredModel", at: str) -> Array:
        """The vector or rows times the scale.

        Raises:
            SteeringValidationError: they are not finite in the model's dtype.

        """
        if self.scale == 1.0:
            return self.main
        with np.errstate(over="ignore"):
            return check_finite(self.main * np.float32(self.scale), model.dtype, at)

    def moved(self, tap: Tap, at: str) -> "Entry":
        """The same entry at another layer's point of the same shape.

        Args:
            tap: where it acts now.
            at: the entry's name in messages.

        Raises:
            SteeringValidationError: it cannot act there.

        """
        if self.details.when is not None:
            check_known(self.details.when.tap, tap, f"{at}.when")
        return replace(self, tap=tap)

    def operations(self) -> list[Operation]:
        """The operations of an entry that is not plain; none if nothing is added."""
        if not self.rows:
            one = self._operation(self.main, self.positions)
            return [one] if self.op != "add" or (self.scale * self.main).any() else []
        every = [self._operation(self.main[o], s, len(o)) for s, o in self.rows]
        acting = self.op != "add" or self.scale
        return [
            without_zeros(one)
            for one in every
            if acting and (self.op != "add" or one.vector.any())
        ]

    def _operation(
        self, main: Array, positions: Spans | None, num_rows: int = 0
    ) -> Operation:
        bounds = self.low, self.high
        return operation(
            self.tap,
            self.op,
            main,
            self.scale,
            bounds,
            self.norm_match,
            positions,
            self.details,
            num_rows,
        )


def parse_entry(
    raw: Mapping[str, Any], tap: Tap, model: "SteeredModel", at: str
) -> Entry:
    """Parse one entry.

    Args:
        raw: an object with the keys of its operation and of `COMMON`.
        tap: where it acts.
        model: the model that its vectors must fit.
        at: the entry's name in messages.

    Raises:
        SteeringValidationError: naming the parameter, the value and the remedy.

    """
    op = _op(raw, at)
    heads, of_row = heads_of_entry(raw, tap, model, at)
    if "from" in raw:
        raw = with_rows(raw, tap, of_row, at)
        raw = raw if heads is None else heads.cut(raw)
    values = read(raw, OPS[op], of_row, at)
    if heads is not None:
        values = heads.spread(values, op)
    low, high = _bounds(op, values, at)
    feature = None
    if op == "feature":
        feature = parse_feature(values, tap, model, at)
    main = next((values[n] for n in MAIN if values.get(n) is not None), NO_VECTOR)
    others = ((name, values[name]) for name in OTHERS if values.get(name) is not None)
    norm_match = values.get("norm_match", False)
    directed = norm_match or op in ("project_out", "clamp", "swap")
    if directed and not main.any(axis=-1).all():
        raise fail(
            f"{at}: a vector of zeros has no direction, which "
            f"{'norm_match' if norm_match else op} needs",
            at,
            op,
        )
    spans: Spans | None = None
    by_row: Rows = ()
    where = f"{at}.positions"
    if values.get("vectors") is None:
        if raw.get("positions") is not None:
            spans = parse_positions(raw["positions"], where)
    else:
        by_row = row_positions(raw.get("positions"), len(main), where)
    when = raw.get("when")
    details = Details(
        values.get("strength", 1.0),
        values.get("alpha", 1.0),
        values.get("degrees", 0.0),
        values.get("activation", "identity"),
        tuple((name, one.astype("<f4").tobytes()) for name, one in others),
        None if when is None else parse_when(when, tap, model, f"{at}.when"),
        feature,
    )
    scale = values.get("scale", 1.0)
    return Entry(tap, op, main, scale, low, high, norm_match, spans, details, by_row)


def _op(entry: Mapping[str, Any], at: str) -> OpName:
    """The entry's operation, after a check that all keys belong to it."""
    op = entry.get("op", "add")
    if not isinstance(op, str) or op not in OPS:
        raise fail(
            f"{at}.op: {shown(op)} is not one of {list(OP_NAMES)}", f"{at}.op", op
        )
    table = OPS[op]
    unknown = sorted(str(name) for name in entry if name not in KEYS)
    needed = [name for name, key in table.items() if key.default is REQUIRED]
    if "vectors" in table:
        needed = ["vectors" if "vectors" in entry else "vector"]
        needed = [] if op == "replace" and "from" in entry else needed
    missing = [name for name in needed if name not in entry]
    if unknown or missing:
        raise fail(
            f'{at}: an entry is a vector, or an object, with "op": "{op}" of the keys '
            f"{[*table, *COMMON]}; "
            + (
                f"it has no key {shown(unknown[0])}"
                if unknown
                else f"{missing[0]} is missing"
            ),
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
            "to the bounds",
            at,
            entry["scale"],
        )
    for name in entry:
        if name not in table and name not in COMMON:
            goes = [other for other, keys in OPS.items() if name in keys]
            raise fail(
                f'{at}.{name} goes with "op" {" or ".join(goes)}, not with {op}',
                f"{at}.{name}",
                op,
            )
    return op


def _bounds(op: OpName, values: Values, at: str) -> tuple[float | None, float | None]:
    """The bounds of a clamp, or of the activation `clip`."""
    low, high, value = (values.get(name) for name in ("min", "max", "value"))
    if op == "clamp" and value is not None:
        if low is not None or high is not None:
            raise fail(
                f"{at}: value sets both min and max; give either value, or min and max",
                f"{at}.value",
                value,
            )
        low = high = value
    activation = values.get("activation", "identity")
    has_threshold = values.get("threshold") is not None
    if has_threshold != (activation == "jumprelu") and not (
        has_threshold and activation == "step"
    ):
        raise fail(
            f"{at}: jumprelu needs a threshold, step may have one, and no other "
            "activation has",
            f"{at}.threshold",
            activation,
        )
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
    return low, high

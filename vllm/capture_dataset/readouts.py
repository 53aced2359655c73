# SPDX-License-Identifier: Apache-2.0
"""Readouts as columns of a data set, next to the rows.

A readout with one result per place (lens, norm, rows) gives each row the result of the
row's own layer and hook point. Results for the token as a whole (probe, sae, custom)
are repeated for the token's row in every layer.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from vllm.capture_dataset.spec import RowsSpec
from vllm.v1.capture.errors import fail
from vllm.v1.readouts.results import ReadoutResult
from vllm.v1.residual.readout_plan import Array
from vllm.v1.residual.tap import Tap

if TYPE_CHECKING:
    from vllm.capture_dataset.table import Captured

BY_TAP = ("lens", "norm", "rows")
"""Kinds whose arrays have a dimension of taps."""
WITH_LAYERS, WITH_HOOKS = "lens", ("norm", "rows")

Results = Mapping[str, ReadoutResult]


@dataclass(frozen=True, slots=True)
class ReadoutColumn:
    """A column of the table, such as `lens.logprobs`."""

    readout: str
    array: str
    dtype: str
    """The dtype's name in NumPy."""
    shape: tuple[int, ...]
    """Shape of one row's value; `()` for a number."""
    taps: tuple[Tap, ...]
    """The taps whose rows have a value, in the order of the array; empty for all
    taps."""
    reduced: bool = False
    """Whether a sample has a single value, at its last row; the others are null."""

    @property
    def name(self) -> str:
        """The column's name in the table."""
        return f"{self.readout}.{self.array}"

    @property
    def type(self) -> pa.DataType:
        """The column's type in the table: a number, or fixed-size lists of numbers."""
        kind = pa.from_numpy_dtype(np.dtype(self.dtype))
        for size in reversed(self.shape):
            kind = pa.list_(kind, size)
        return kind

    @property
    def row_bytes(self) -> int:
        """Bytes of a token's values, over all taps with values of their own."""
        return prod(self.shape, start=np.dtype(self.dtype).itemsize) * max(
            len(self.taps), 1
        )

    def as_dict(self) -> dict[str, Any]:
        """The column as plain data for the manifest."""
        taps = [list(tap) for tap in self.taps]
        said = {"dtype": self.dtype, "shape": list(self.shape), "taps": taps}
        return said | {"reduced": self.reduced}

    def of_tap(self, tap: Tap, items: "Sequence[Captured]") -> pa.Array:
        """The column for each row of a tap: a value or null."""
        count = sum(len(item.positions) for item in items)
        if self.taps and tap not in self.taps:
            return pa.nulls(count, self.type)
        at = self.taps.index(tap) if self.taps else None
        parts, valid = [], np.ones(count, bool)
        stop = 0
        for item in items:
            rows = len(item.positions)
            stop += rows
            array = item.readouts[self.readout].arrays.get(self.array)
            part = np.zeros((rows, *self.shape), self.dtype)
            if self.reduced:
                valid[stop - rows : stop] = False
                if rows and array is not None:
                    part[-1] = array if at is None else array[at]
                    valid[stop - 1] = True
            elif array is not None:
                positions = item.readouts[self.readout].positions
                if len(positions) != rows:  # `keep_when` has dropped some.
                    array = array[np.searchsorted(positions, item.positions)]
                part[:] = array if at is None else array[:, at]
            parts.append(part)
        return self._listed(np.concatenate(parts), valid)

    def _listed(self, values: Array, valid: Array) -> pa.Array:
        missing = None if valid.all() else pa.array(~valid)
        if not self.shape:
            return pa.array(values, mask=None if missing is None else ~valid)
        found: pa.Array = pa.array(np.ascontiguousarray(values).reshape(-1))
        for axis, size in reversed(list(enumerate(self.shape))):
            mask = missing if axis == 0 else None
            found = pa.FixedSizeListArray.from_arrays(found, size, mask=mask)
        return found


def parse_readouts(given: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Parse the option `--readout`, `NAME={...}` or a kind, to specs by name.

    Raises:
        CaptureValidationError: a value is neither, or a name is repeated.

    """
    found: dict[str, dict[str, Any]] = {}
    for text in given:
        name, equals, raw = text.partition("=")
        try:
            spec = json.loads(raw) if equals else {"kind": name}
        except ValueError as error:
            raise _bad(f"{text!r} is not NAME=JSON: {error}", text) from None
        if not isinstance(spec, dict) or not name.strip():
            raise _bad(f"{text!r} must be a kind, or NAME={{...}}", text)
        if name in found:
            raise _bad(f"{name!r} is given twice; choose another name", text)
        found[name] = spec
    return found


def completed(rows: RowsSpec) -> dict[str, dict[str, Any]]:
    """The readout specs of requests, completed from the rows of the data set.

    Raises:
        CaptureValidationError: the results would not belong to captured rows.

    """
    found = {}
    for name, given in rows.readouts.items():
        spec = dict(given)
        wanted = spec.setdefault("positions", rows.positions)
        if spec.get("reduce", "none") == "none" and wanted != rows.positions:
            raise _bad(
                f"{name!r} has the positions {wanted!r}, and rows have "
                f"{rows.positions!r}, to which its results belong; omit those of the "
                "readout",
                wanted,
            )
        if spec.get("kind") == WITH_LAYERS:
            spec.setdefault("hook", rows.hooks[0])
            if spec["hook"] in rows.hooks:
                spec.setdefault("layers", sorted(rows.layers))
        if spec.get("kind") in WITH_HOOKS:
            spec.setdefault("hooks", rows.capture()["hooks"])
        found[name] = spec
    return found


def columns_of(results: Results, rows: RowsSpec) -> tuple[ReadoutColumn, ...]:
    """The columns for results of this form.

    Args:
        results: the results of one prompt, which determine dtypes and shapes.
        rows: the rows of the data set.

    Raises:
        CaptureValidationError: a result belongs to no captured row.

    """
    found = []
    for name, result in results.items():
        by_tap = result.kind in BY_TAP
        reduced = rows.readouts[name].get("reduce", "none") != "none"
        strange = set(result.taps) - set(rows.taps) if by_tap else set()
        if strange:
            layer, hook = min(strange)
            raise _bad(
                f"{name!r} reads {hook} of layer {layer}, whose rows are not captured; "
                "add it to --layers and --hook, or leave it out of the readout",
                [layer, hook],
            )
        if result.error is not None or not result.arrays:
            raise _bad(
                f"{name!r} gave nothing for the first prompt"
                + (
                    f": {result.error}"
                    if result.error
                    else "; are there tokens at "
                    "its positions? Generated ones need --max-tokens 2 or more"
                ),
                None,
            )
        first = int(by_tap) + int(not reduced)
        for key, array in result.arrays.items():
            shape, dtype = array.shape[first:], str(array.dtype)
            taps = result.taps if by_tap else ()
            found.append(ReadoutColumn(name, key, dtype, shape, tuple(taps), reduced))
    return tuple(found)


def from_facts(facts: Mapping[str, Any]) -> dict[str, ReadoutColumn]:
    """The columns that a manifest lists, by name."""
    found = {}
    for name, column in facts.get("readouts", {}).get("columns", {}).items():
        readout, _, array = name.rpartition(".")
        found[name] = ReadoutColumn(
            readout=readout,
            array=array,
            dtype=column["dtype"],
            shape=tuple(column["shape"]),
            taps=tuple((layer, hook) for layer, hook in column["taps"]),
            reduced=column["reduced"],
        )
    return found


def beside(column: ReadoutColumn, tap: Tap) -> str:
    """A column's name in a file with one line for the rows of all taps."""
    return f"{column.name}.{tap[1]}.{tap[0]}" if column.taps else column.name


def _bad(what: str, value: Any) -> Exception:
    return fail(f"readout: {what}", "readout", value)

# SPDX-License-Identifier: Apache-2.0
"""Results of readouts as rows, in the form in which consumers take them."""

from collections.abc import Iterator

import numpy as np

from vllm.v1.readouts.results import Array, ReadoutResult
from vllm.v1.residual.readout_plan import Readout, ReadoutRows
from vllm.v1.residual.tap import Tap

BY_TAP = ("lens", "norm", "rows", "attention", "attribution")
"""Kinds whose arrays have a dimension of taps."""

_STORED = ("float16", "float32", "float64", "int32", "int64")
"""Dtypes that every format of rows can hold."""


def rows_of(readout: Readout, result: ReadoutResult) -> list[ReadoutRows]:
    """A readout's result as rows: one entry per array and tap.

    A custom readout of several taps has one value per token, which is given to the last
    of them. A reduced result is one row.

    Args:
        readout: the readout.
        result: its result for all valid tokens.

    """
    reduced = readout.reduce != "none"
    return [
        ReadoutRows(
            name=readout.name,
            kind=readout.kind,
            array=name,
            tap=tap,
            positions=result.positions,
            dtype=str(values.dtype),
            shape=values.shape[1:],
            data=values.tobytes(),
            reduced=reduced,
            error=result.error or "",
        )
        for name, array in result.arrays.items()
        for tap, values in _by_tap(readout, _storable(array), reduced)
    ]


def _by_tap(
    readout: Readout, array: Array, reduced: bool
) -> Iterator[tuple[Tap, Array]]:
    """The values `[rows, ...]` of each tap."""
    if readout.full:
        yield readout.taps[-1], array.swapaxes(0, 1)
        return
    if readout.kind not in BY_TAP:
        yield readout.taps[-1], array
        return
    for number, tap in enumerate(readout.taps):
        yield tap, array[number : number + 1] if reduced else array[:, number]


def _storable(array: Array) -> Array:
    if str(array.dtype) in _STORED:
        return array
    small = np.can_cast(array.dtype, np.int32)
    whole = array.dtype.kind in "iub"
    return array.astype((np.int32 if small else np.int64) if whole else np.float32)

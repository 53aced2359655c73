# SPDX-License-Identifier: Apache-2.0
"""Results of readouts as columns of a table, beside the captured rows.

A table row is a token at a layer and hook point. A column such as `lens.logprobs` holds
the token's value there, and null where the readout has none.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from vllm.v1.capture.consumers.storage.stored_request import StoredRequest
from vllm.v1.capture.types import CaptureFinalize
from vllm.v1.residual.tap import Tap

_WHOLE = 1 << 62
"""A size that no result has, so that blocks are not split."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column with one array of a readout."""

    name: str
    """`NAME.ARRAY`."""
    dtype: str
    shape: tuple[int, ...]
    """Of one value; `()` for a number. More than one dimension is flattened."""
    kind: str

    @property
    def type(self) -> pa.DataType:
        """A number, or a list of fixed size."""
        element = pa.from_numpy_dtype(np.dtype(self.dtype))
        return element if not self.shape else pa.list_(element, self.width)

    @property
    def width(self) -> int:
        """Numbers per value."""
        return torch.Size(self.shape).numel()

    def array(self, values: "Values | None", positions: Sequence[int]) -> pa.Array:
        """The column at some positions; null where there is no value."""
        rows = {} if values is None else values.rows
        taken = [rows.get(position, -1) for position in positions]
        if values is None or max(taken, default=-1) < 0:
            return pa.nulls(len(positions), self.type)
        kept = np.asarray(taken)
        numbers = pa.array(values.numbers[np.maximum(kept, 0)].reshape(-1))
        mask = pa.array(kept < 0)
        if self.shape:
            size = self.width
            return pa.FixedSizeListArray.from_arrays(numbers, size, mask=mask)
        return pa.array(numbers.to_numpy(), mask=kept < 0)


@dataclass(frozen=True, slots=True, eq=False)
class Values:
    """The values of one key."""

    rows: Mapping[int, int]
    """The row of each position."""
    numbers: np.ndarray[Any, np.dtype[Any]]
    """`[rows, width]`."""


def is_readout(finalize: CaptureFinalize) -> bool:
    """Whether a key holds results of a readout."""
    return "readout" in finalize.sidecar


def columns_of(finalizes: Iterable[CaptureFinalize]) -> tuple[Column, ...]:
    """The columns for keys of readouts, sorted by name."""
    found = {}
    for sidecar in (one.sidecar for one in finalizes if is_readout(one)):
        readout = sidecar["readout"]
        column = Column(
            f"{readout['name']}.{readout['array']}",
            sidecar["dtype"],
            tuple(readout["shape"]),
            readout["kind"],
        )
        if column.width:
            found[column.name] = column
    return tuple(found[name] for name in sorted(found))


def described(columns: Sequence[Column]) -> str:
    """The columns as JSON, for the metadata of a file."""
    facts = {one.name: {"kind": one.kind, "shape": list(one.shape)} for one in columns}
    return json.dumps(facts)


def values_by_tap(
    request: StoredRequest, finalizes: Iterable[CaptureFinalize]
) -> dict[Tap, dict[str, Values]]:
    """The values of each column, by layer and hook point.

    Raises:
        OSError: values are missing.

    """
    found: dict[Tap, dict[str, Values]] = {}
    for finalize in finalizes:
        sidecar, readout = finalize.sidecar, finalize.sidecar["readout"]
        parts = list(request.blocks(finalize, _WHOLE))
        if not parts:
            continue
        rows = {position: row for row, position in enumerate(sidecar["positions"])}
        values = Values(rows, torch.cat(parts).numpy())
        tap = sidecar["layer"], readout["hook"]
        found.setdefault(tap, {})[f"{readout['name']}.{readout['array']}"] = values
    return found


def tokens_of(finalizes: Iterable[CaptureFinalize]) -> dict[int, int | None]:
    """The token id of each position that any of the keys has."""
    return {
        position: token
        for one in finalizes
        for position, token in zip(one.sidecar["positions"], one.sidecar["token_ids"])
    }

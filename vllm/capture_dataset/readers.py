# SPDX-License-Identifier: Apache-2.0
"""Lazy readers of shards, by format: columns, and values by tap and row."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from vllm.capture_dataset.readouts import ReadoutColumn, beside, from_facts
from vllm.v1.residual.tap import Tap

Array = np.ndarray[Any, np.dtype[Any]]


def not_beside(facts: dict[str, Any]) -> list[str]:
    """Columns of the table that differ between taps."""
    readouts = from_facts(facts).values()
    return ["layer", "hook", "values", *(one.name for one in readouts if one.taps)]


class ParquetShard:
    """Reads Parquet files, with several row groups per tap."""

    def __init__(self, path: Path, facts: dict[str, Any], taps: list[Tap]) -> None:
        self._path = path
        self._file = pq.ParquetFile(path, memory_map=True)
        self._width = facts["model"]["hidden_size"]
        self._not_beside = not_beside(facts)
        metadata = self._file.metadata
        self._sizes = [
            metadata.row_group(number).num_rows
            for number in range(metadata.num_row_groups)
        ]
        self._per_tap = len(self._sizes) // len(taps)
        self.num_rows = metadata.num_rows // len(taps)
        """Rows of one tap."""

    def columns(self) -> pa.Table:
        """All columns except layer, hook and values: one line per row of any tap."""
        names = self._file.schema_arrow.names
        names = [n for n in names if n not in self._not_beside]
        return self._file.read_row_groups(range(self._per_tap), columns=names)

    def values(self, tap: int, first: int, stop: int) -> torch.Tensor:
        """Rows `[stop - first, hidden_size]` of the tap with this index."""
        parts, start = [], 0
        for group in range(tap * self._per_tap, (tap + 1) * self._per_tap):
            size = self._sizes[group]
            if start < stop and start + size > first:
                table = self._file.read_row_group(group, columns=["values"])
                rows = _rows_of(table.column("values").combine_chunks(), self._width)
                parts.append(rows[max(first - start, 0) : stop - start])
            start += size
        return torch.cat(parts) if parts else torch.empty(0, self._width)

    def readout(self, tap: int, column: ReadoutColumn) -> pa.ChunkedArray:
        """A readout's column for the rows of a tap, `[num_rows]`."""
        groups = range(tap * self._per_tap, (tap + 1) * self._per_tap)
        return self._file.read_row_groups(groups, columns=[column.name]).column(0)


class SafetensorsShard:
    """Reads Safetensors files, with a tensor per tap; columns are in another file."""

    def __init__(self, path: Path, facts: dict[str, Any], taps: list[Tap]) -> None:
        self._path = path
        self._beside = path.with_suffix(".rows.parquet")
        self._taps = taps
        self._by_tap = {
            beside(column, tap)
            for column in from_facts(facts).values()
            for tap in column.taps
        }
        self.num_rows = pq.read_metadata(self._beside).num_rows

    def columns(self) -> pa.Table:
        """See `ParquetShard`."""
        names = pq.read_schema(self._beside).names
        return pq.read_table(
            self._beside, columns=[name for name in names if name not in self._by_tap]
        )

    def readout(self, tap: int, column: ReadoutColumn) -> pa.ChunkedArray:
        """See `ParquetShard`."""
        if column.taps and self._taps[tap] not in column.taps:
            return pa.chunked_array([pa.nulls(self.num_rows, column.type)])
        name = beside(column, self._taps[tap])
        return pq.read_table(self._beside, columns=[name]).column(0)

    def values(self, tap: int, first: int, stop: int) -> torch.Tensor:
        """See `ParquetShard`."""
        from safetensors import safe_open

        layer, hook = self._taps[tap]
        with safe_open(self._path, "pt") as opened:
            rows: torch.Tensor = opened.get_slice(f"{hook}.{layer}")[first:stop]
        return rows


ShardReader: TypeAlias = ParquetShard | SafetensorsShard
READERS: dict[str, Callable[[Path, dict[str, Any], list[Tap]], ShardReader]] = {
    "parquet": ParquetShard,
    "safetensors": SafetensorsShard,
}


def _rows_of(values: Any, width: int) -> torch.Tensor:
    """A fixed-size list column as `[rows, width]`, without a copy if possible."""
    flat: Array = values.flatten().to_numpy(zero_copy_only=False)
    # Arrow's memory is read-only, which tensors do not support.
    return torch.from_numpy(flat.copy() if not flat.flags.writeable else flat).view(
        -1, width
    )

# SPDX-License-Identifier: Apache-2.0
"""A data set of captured rows: one lazy view `[sample, position, hidden]` per layer."""

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from vllm.capture_dataset.manifest import Manifest, checksum
from vllm.capture_dataset.readouts import ReadoutColumn, beside, from_facts
from vllm.capture_dataset.view import LayerView
from vllm.v1.capture.errors import fail
from vllm.v1.residual.tap import Tap

Array = np.ndarray[Any, np.dtype[Any]]


class ParquetShard:
    """Reads Parquet files, with several row groups per tap."""

    def __init__(self, path: Path, facts: dict[str, Any], taps: list[Tap]) -> None:
        self._path = path
        self._file = pq.ParquetFile(path, memory_map=True)
        self._width = facts["model"]["hidden_size"]
        by_tap = [one.name for one in from_facts(facts).values() if one.taps]
        self._by_tap = {"layer", "hook", "values", *by_tap}
        """Columns that differ between taps."""
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
        names = [n for n in names if n not in self._by_tap]
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


_OF_MANIFEST = ("folder", "manifest", "facts", "taps")
"""Attributes of a data set that are read from its manifest."""


def load_dataset(folder: str | Path) -> "CaptureDataset":
    """Open a data set of `vllm capture`; only the manifest is read.

    Raises:
        CaptureValidationError: there is no data set, or its format needs another
            reader.

    """
    return CaptureDataset(Path(folder))


class CaptureDataset:
    """A data set's complete shards; it may still be in the process of being written."""

    def __init__(self, folder: Path) -> None:
        """Read the manifest."""
        self.folder = folder
        self.manifest = Manifest.read(folder)
        self.facts = self.manifest.facts
        if self.facts["format"] not in READERS:
            raise fail(
                f"folder: {str(folder)!r} has the format {self.facts['format']!r}; "
                f"load_dataset reads {sorted(READERS)}. datasets.load_from_disk opens "
                "'saelens', and the version that wrote it any other",
                "folder",
                str(folder),
            )
        self.taps: list[Tap] = [
            (layer, hook)
            for layer in self.facts["layers"]
            for hook in self.facts["hooks"]
        ]

    def __len__(self) -> int:
        """Number of samples that have rows."""
        return len(self._starts) - 1 if self.manifest.shards else 0

    def __getstate__(self) -> dict[str, Any]:
        """What another process needs; it opens the files itself."""
        return {name: vars(self)[name] for name in _OF_MANIFEST}

    @cached_property
    def readouts(self) -> dict[str, ReadoutColumn]:
        """The columns of readouts, by name."""
        return from_facts(self.facts)

    @cached_property
    def shards(self) -> list[ShardReader]:
        """The readers of all shards."""
        opened = READERS[self.facts["format"]]
        return [
            opened(self.folder / shard.file, self.facts, self.taps)
            for shard in self.manifest.shards
        ]

    @cached_property
    def columns(self) -> pa.Table:
        """A line per row of any tap, with its sample, position and carried columns."""
        tables = [shard.columns() for shard in self.shards]
        return pa.concat_tables(tables, promote_options="permissive")

    @cached_property
    def _starts(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The first row of each sample, then the number of rows; `[samples + 1]`."""
        samples = self.columns.column("sample").to_numpy()
        new = np.flatnonzero(np.diff(samples, prepend=-1))
        return np.append(new, len(samples))

    @cached_property
    def samples(self) -> pa.Table:
        """A line per sample: its number, its id, carried columns, number of rows."""
        beside = ("sample", "prompt_id", *self.facts["carry"])
        found = self.columns.select(beside).take(pa.array(self._starts[:-1]))
        return found.append_column("num_rows", pa.array(np.diff(self._starts)))

    def layer(self, layer: int, hook: str | None = None) -> LayerView:
        """The rows of one layer at one hook point.

        Raises:
            KeyError: the layer or hook point was not captured.

        """
        hook = hook or self.facts["hooks"][0]
        if (layer, hook) not in self.taps:
            raise KeyError(
                f"layer {layer}, {hook!r} was not captured; {self.taps} were"
            )
        return LayerView(self, self.taps.index((layer, hook)))

    def layer_cosines(self, hook: str | None = None) -> tuple[list[int], torch.Tensor]:
        """The layers, and mean cosines of their rows by token, `[layers, layers]`."""
        layers = self.facts["layers"]
        views = [self.layer(layer, hook) for layer in layers]
        total = torch.zeros(len(layers), len(layers), dtype=torch.float64)
        for blocks in zip(*(view.blocks() for view in views)):
            unit = torch.nn.functional.normalize(torch.stack(blocks).double(), dim=-1)
            total += torch.einsum("irh,jrh->ij", unit, unit)
        return layers, (total / max(self._starts[-1], 1)).float()

    def sample_cosines(
        self, layer: int, hook: str | None = None
    ) -> tuple[list[str], torch.Tensor]:
        """The samples' ids, and the cosines `[samples, samples]` of their mean rows."""
        means = self.layer(layer, hook).means()
        unit = torch.nn.functional.normalize(means.double(), dim=-1)
        ids = self.samples.column("prompt_id").to_pylist()
        return ids, (unit @ unit.T).float()

    def verify(self) -> None:
        """Compare every file with its checksum.

        Raises:
            ValueError: a file has changed; the message names it.

        """
        for shard in self.manifest.shards:
            for name, wanted in shard.files.items():
                if checksum(self.folder / name) != wanted:
                    raise ValueError(
                        f"{self.folder / name} has changed since it was written"
                    )

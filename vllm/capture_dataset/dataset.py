# SPDX-License-Identifier: Apache-2.0
"""A data set of captured rows: one lazy view `[sample, position, hidden]` per layer."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow as pa
import torch

from vllm.capture_dataset.manifest import Manifest, checksum
from vllm.capture_dataset.readers import READERS, ShardReader, open_shard
from vllm.capture_dataset.spec import Tap
from vllm.v1.capture.consumers.filesystem.store import Statistics
from vllm.v1.capture.selectors import fail

BLOCK_ROWS = 4096
"""So many rows are in memory at once while statistics are computed."""


def load_dataset(folder: str | Path) -> "CaptureDataset":
    """Open what `vllm capture` has written; reads the manifest only.

    Raises:
        CaptureValidationError: there is no data set, or one that has other readers.

    """
    return CaptureDataset(Path(folder))


class CaptureDataset:
    """Whole shards of a folder; one that is still being written may be opened too."""

    def __init__(self, folder: Path) -> None:
        """Read the manifest."""
        self.folder = folder
        self.manifest = Manifest.read(folder)
        self.facts = self.manifest.facts
        if self.facts["format"] not in READERS:
            raise fail(
                f"folder: {str(folder)!r} has the format {self.facts['format']!r}, for "
                "SAELens and datasets.load_from_disk; load_dataset reads "
                f"{sorted(READERS)}",
                "folder",
                str(folder),
            )
        self.taps: list[Tap] = [
            (layer, hook)
            for layer in self.facts["layers"]
            for hook in self.facts["hooks"]
        ]

    def __len__(self) -> int:
        """Samples."""
        return sum(shard.num_prompts for shard in self.manifest.shards)

    @cached_property
    def shards(self) -> list[ShardReader]:
        """The readers of all shards."""
        return [
            open_shard(self.folder, shard.file, self.facts, self.taps)
            for shard in self.manifest.shards
        ]

    @cached_property
    def columns(self) -> pa.Table:
        """A line per row of any tap: sample, prompt_id, carried ones, position, ..."""
        tables = [shard.columns() for shard in self.shards]
        return pa.concat_tables(tables, promote_options="permissive")

    @cached_property
    def _starts(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The first row of each sample, and the number of all rows `[samples + 1]`."""
        samples = self.columns.column("sample").to_numpy()
        new = np.flatnonzero(np.diff(samples, prepend=-1))
        return np.append(new, len(samples))

    @cached_property
    def samples(self) -> pa.Table:
        """A line per sample: its number, its id, what was carried, its rows."""
        beside = ("sample", "prompt_id", *self.facts["carry"])
        found = self.columns.select(beside).take(pa.array(self._starts[:-1]))
        return found.append_column("num_rows", pa.array(np.diff(self._starts)))

    def layer(self, layer: int, hook: str | None = None) -> "LayerView":
        """The rows of a layer.

        Raises:
            KeyError: it was not captured.

        """
        hook = hook or self.facts["hooks"][0]
        if (layer, hook) not in self.taps:
            raise KeyError(
                f"layer {layer}, {hook!r} was not captured; {self.taps} were"
            )
        return LayerView(self, self.taps.index((layer, hook)))

    def layer_cosines(self, hook: str | None = None) -> tuple[list[int], torch.Tensor]:
        """The layers, and `[layers, layers]`: the mean cosine of rows at one token."""
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
        """The samples' ids, and `[samples, samples]`: cosines of their mean rows."""
        means = self.layer(layer, hook).means()
        unit = torch.nn.functional.normalize(means.double(), dim=-1)
        ids = self.samples.column("prompt_id").to_pylist()
        return ids, (unit @ unit.T).float()

    def verify(self) -> None:
        """Compare every file with its checksum.

        Raises:
            ValueError: one has changed; names it.

        """
        for shard in self.manifest.shards:
            for name, wanted in shard.files.items():
                if checksum(self.folder / name) != wanted:
                    raise ValueError(f"{self.folder / name} is not what was written")


class LayerView:
    """The rows of one tap over all samples: `[sample, position, hidden]`, read lazily.

    `view[i]` is a sample's rows; with `len` that is what `torch.utils.data.DataLoader`
    wants. `view[i:j]` is padded where samples have different numbers of rows.
    """

    def __init__(self, dataset: CaptureDataset, tap: int) -> None:
        """View a tap of a data set, by its index."""
        self._dataset = dataset
        self._tap = tap
        self._first_rows = np.cumsum([0, *(s.num_rows for s in dataset.shards)])

    def __len__(self) -> int:
        return len(self._dataset)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Samples, the most rows that one has, width."""
        counts = np.diff(self._dataset._starts)
        return len(self), int(counts.max(initial=0)), self._width

    @property
    def _width(self) -> int:
        width: int = self._dataset.facts["model"]["hidden_size"]
        return width

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, index: slice | Sequence[int]) -> torch.Tensor: ...
    def __getitem__(self, index: int | slice | Sequence[int]) -> torch.Tensor:
        """A sample's `[position, hidden]`, or several `[sample, position, hidden]`."""
        if isinstance(index, int):
            return self._rows(*self._span(index))
        chosen = range(len(self))[index] if isinstance(index, slice) else index
        return self.padded(chosen)[0]

    def _span(self, index: int) -> tuple[int, int]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        starts, index = self._dataset._starts, index % len(self)
        return int(starts[index]), int(starts[index + 1])

    def positions(self, index: int) -> list[int]:
        """The token positions of a sample's rows."""
        start, stop = self._span(index)
        column = self._dataset.columns.column("position")
        found: list[int] = column.slice(start, stop - start).to_pylist()
        return found

    def padded(self, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Samples side by side.

        Returns:
            Rows `[sample, position, hidden]`, zero where a sample has fewer, and a mask
            `[sample, position]` of those that it has.

        """
        found = [self[int(index)] for index in indices]
        if not found:
            return torch.empty(0, 0, self._width), torch.empty(0, 0, dtype=torch.bool)
        most = max(map(len, found))
        rows = found[0].new_zeros(len(found), most, self._width)
        mask = torch.zeros(len(found), most, dtype=torch.bool)
        for number, one in enumerate(found):
            rows[number, : len(one)] = one
            mask[number, : len(one)] = True
        return rows, mask

    def blocks(self, num_rows: int = BLOCK_ROWS) -> Iterator[torch.Tensor]:
        """All rows of all samples, at most `num_rows` at a time."""
        for shard in self._dataset.shards:
            for first in range(0, shard.num_rows, num_rows):
                stop = min(first + num_rows, shard.num_rows)
                yield shard.values(self._tap, first, stop)

    def to_torch(self) -> torch.Tensor:
        """All rows `[rows, hidden]`; `columns` of the data set tells what they are."""
        parts = [s.values(self._tap, 0, s.num_rows) for s in self._dataset.shards]
        return torch.cat(parts) if parts else torch.empty(0, self._width)

    def to_numpy(self) -> np.ndarray[Any, np.dtype[Any]]:
        """As `to_torch`; bfloat16, which numpy does not have, becomes float32."""
        rows = self.to_torch()
        return (rows.float() if rows.dtype is torch.bfloat16 else rows).numpy()

    def means(self) -> torch.Tensor:
        """The mean row of each sample `[samples, hidden]`, float32."""
        starts = self._dataset._starts
        owner = np.repeat(np.arange(len(self)), np.diff(starts))
        total = torch.zeros(len(self), self._width, dtype=torch.float64)
        first = 0
        for block in self.blocks():
            index = torch.from_numpy(owner[first : first + len(block)])
            total.index_add_(0, index, block.double())
            first += len(block)
        counts = torch.from_numpy(np.diff(starts)).clamp(min=1)
        return (total / counts[:, None]).float()

    def statistics(self) -> Statistics:
        """Over all rows.

        Raises:
            ValueError: there are none.

        """
        count, norms, largest = 0, 0.0, 0.0
        total = torch.zeros(self._width, dtype=torch.float64)
        squares = torch.zeros_like(total)
        for block in self.blocks():
            values = block.double()
            count += len(values)
            total += values.sum(dim=0)
            squares += values.square().sum(dim=0)
            norms += values.norm(dim=1).sum().item()
            largest = max(largest, values.abs().max().item())
        if not count:
            raise ValueError("the data set has no row yet")
        mean = total / count
        std = (squares / count - mean.square()).clamp(min=0).sqrt()
        return Statistics(count, mean, std, norms / count, largest)

    def _rows(self, start: int, stop: int) -> torch.Tensor:
        shard = int(np.searchsorted(self._first_rows, start, "right")) - 1
        shard = min(shard, len(self._dataset.shards) - 1)
        offset = int(self._first_rows[shard])
        return self._dataset.shards[shard].values(
            self._tap, start - offset, stop - offset
        )

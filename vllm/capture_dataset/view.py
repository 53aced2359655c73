# SPDX-License-Identifier: Apache-2.0
"""The rows of one layer of a data set, read lazily."""

import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
import pyarrow as pa
import torch

from vllm.capture_dataset.readouts import ReadoutColumn
from vllm.v1.capture.consumers.filesystem.store import Statistics, statistics_of

if TYPE_CHECKING:
    from vllm.capture_dataset.dataset import CaptureDataset

BLOCK_ROWS = 4096
"""Most rows in memory while statistics are computed."""


class LayerView:
    """The rows of one tap over all samples: `[sample, position, hidden]`, read lazily.

    `view[i]` is a sample's rows; with `len` this is the interface that
    `torch.utils.data.DataLoader` needs. `view[i:j]` is padded if samples have different
    numbers of rows.
    """

    def __init__(self, dataset: "CaptureDataset", tap: int) -> None:
        """View a tap of a data set, by its index."""
        self._dataset = dataset
        self._tap = tap
        self._first_rows = np.cumsum([0, *(s.num_rows for s in dataset.shards)])

    def __len__(self) -> int:
        return len(self._dataset)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Number of samples, most rows of a sample, width."""
        counts = np.diff(self._dataset._starts)
        return len(self), int(counts.max(initial=0)), self._width

    @property
    def _width(self) -> int:
        width: int = self._dataset.facts["model"]["hidden_size"]
        return width

    def __getitem__(self, index: Any) -> torch.Tensor:
        """A sample's `[position, hidden]`, or several `[sample, position, hidden]`.

        Args:
            index: a number, a slice, numbers, or a mask `[samples]`.

        """
        if isinstance(index, slice):
            return self.padded(range(len(self))[index])[0]
        if np.ndim(index) == 0:
            return self._rows(*self._span(index))
        return self.padded(index)[0]

    def _span(self, index: SupportsIndex) -> tuple[int, int]:
        index = operator.index(index)
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

    def padded(self, indices: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Several samples, given by numbers or a mask, in one padded tensor.

        Returns:
            Rows `[sample, position, hidden]`, zero where a sample has fewer rows, and a
            mask `[sample, position]` of actual rows.

        """
        chosen = np.asarray(indices)
        if chosen.dtype == bool:
            if chosen.shape != (len(self),):
                raise IndexError(f"a mask {chosen.shape} of {len(self)} samples")
            chosen = np.flatnonzero(chosen)
        found = [self[index] for index in chosen]
        if not found:
            return torch.empty(0, 0, self._width), torch.empty(0, 0, dtype=torch.bool)
        most = max(map(len, found))
        rows = found[0].new_zeros(len(found), most, self._width)
        mask = torch.zeros(len(found), most, dtype=torch.bool)
        for number, one in enumerate(found):
            rows[number, : len(one)] = one
            mask[number, : len(one)] = True
        return rows, mask

    def readout(self, name: str) -> np.ndarray[Any, np.dtype[Any]]:
        """The readout column for all rows `[rows, ...]`, such as `lens.logprobs`.

        If a readout reduces, a sample's only value is at its last row; the others are
        NaN, or 0 in a column of integers.

        Raises:
            KeyError: the column does not exist, or not for this layer and hook point.

        """
        data = self._dataset
        column = data.readouts.get(name)
        if column is None:
            raise KeyError(f"{name!r} was not read out; {sorted(data.readouts)} were")
        if column.taps and data.taps[self._tap] not in column.taps:
            raise KeyError(f"{name!r} was read out at {list(column.taps)} only")
        parts = [shard.readout(self._tap, column) for shard in data.shards]
        chunks = [chunk for part in parts for chunk in part.chunks]
        arrays = [_as_numpy(chunk, column) for chunk in chunks]
        return np.concatenate(arrays or [np.empty((0, *column.shape), column.dtype)])

    def blocks(self, num_rows: int = BLOCK_ROWS) -> Iterator[torch.Tensor]:
        """Yield all rows of all samples, at most `num_rows` at a time."""
        for shard in self._dataset.shards:
            for first in range(0, shard.num_rows, num_rows):
                stop = min(first + num_rows, shard.num_rows)
                yield shard.values(self._tap, first, stop)

    def to_torch(self) -> torch.Tensor:
        """All rows `[rows, hidden]`; the data set's `columns` describe them."""
        parts = [s.values(self._tap, 0, s.num_rows) for s in self._dataset.shards]
        return torch.cat(parts) if parts else torch.empty(0, self._width)

    def to_numpy(self) -> np.ndarray[Any, np.dtype[Any]]:
        """All rows `[rows, hidden]`; bfloat16, which NumPy lacks, becomes float32."""
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
        """Statistics over all rows.

        Raises:
            ValueError: there are no rows.

        """
        found = statistics_of(self.blocks())
        if found is None:
            raise ValueError("the data set has no rows yet")
        return found

    def _rows(self, start: int, stop: int) -> torch.Tensor:
        shard = int(np.searchsorted(self._first_rows, start, "right")) - 1
        shard = min(shard, len(self._dataset.shards) - 1)
        offset = int(self._first_rows[shard])
        return self._dataset.shards[shard].values(
            self._tap, start - offset, stop - offset
        )


def _as_numpy(chunk: pa.Array, column: ReadoutColumn) -> np.ndarray[Any, np.dtype[Any]]:
    """A column as `[rows, *shape]`; null becomes NaN or 0."""
    missing = chunk.is_null().to_numpy(zero_copy_only=False)
    flat = chunk
    for _ in column.shape:
        # Unlike `flatten`, `values` has an entry for null too.
        start, size = flat.offset * flat.type.list_size, len(flat) * flat.type.list_size
        flat = flat.values.slice(start, size)
    found: np.ndarray[Any, np.dtype[Any]] = np.array(
        flat.fill_null(0).to_numpy(zero_copy_only=False), column.dtype
    ).reshape(len(chunk), *column.shape)
    if missing.any():
        found[missing] = np.nan if found.dtype.kind == "f" else 0
    return found

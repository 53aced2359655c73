# SPDX-License-Identifier: Apache-2.0
"""A data set of captured rows: one lazy view `[sample, position, hidden]` per layer."""

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from vllm.capture_dataset.manifest import Manifest, checksum
from vllm.capture_dataset.readers import READERS, ShardReader
from vllm.capture_dataset.readouts import ReadoutColumn, from_facts
from vllm.capture_dataset.view import LayerView
from vllm.v1.capture.errors import fail
from vllm.v1.residual.tap import Tap


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
        """Number of samples."""
        return sum(shard.num_prompts for shard in self.manifest.shards)

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

# SPDX-License-Identifier: Apache-2.0
"""Lazy access to all files of a root, by request, layer, hook and position.

Opening a store only reads the indices. Rows are memory-mapped when and as far as they
are requested.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm.v1.capture.consumers.filesystem.reader import (
    check_raw,
    own_indices,
    rows_in,
    shard_indices,
)
from vllm.v1.capture.consumers.storage.files import ASIDE

STATISTICS_ROWS = 4096
"""Number of rows that are loaded at once to compute statistics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRows:
    """The rows of one request at one tap; loaded on access."""

    tag: str
    request_id: str
    layer: int
    hook: str
    path: Path
    offset: int
    num_rows: int
    width: int
    dtype: torch.dtype
    positions: Sequence[int]
    token_ids: Sequence[int | None]
    heads: Sequence[int] = ()
    """The heads of which a row consists; empty if it is whole."""

    def __len__(self) -> int:
        return self.num_rows

    def to_torch(self, positions: Sequence[int] | None = None) -> torch.Tensor:
        """Load rows `[rows, width]` in the captured dtype.

        Args:
            positions: token positions, in the order of the result; by default all
                rows. These are a private mapping of the file, so writing to the tensor
                does not change the file.

        Raises:
            KeyError: a position was not captured.

        """
        if positions is None:
            return self._rows(0, self.num_rows)
        index = {position: row for row, position in enumerate(self.positions)}
        missing = [position for position in positions if position not in index]
        if missing:
            raise KeyError(
                f"position {missing[0]} of {self.request_id!r} was not captured; "
                f"captured are {len(self)} between {self.positions[0]} and "
                f"{self.positions[-1]}"
                if len(self)
                else f"{self.request_id!r} has no rows here"
            )
        rows = [index[position] for position in positions]
        if not rows:
            return torch.empty(0, self.width, dtype=self.dtype)
        first = min(rows)
        return self._rows(first, max(rows) + 1)[[row - first for row in rows]]

    def to_numpy(
        self, positions: Sequence[int] | None = None
    ) -> np.ndarray[Any, np.dtype[Any]]:
        """Like `to_torch`; bfloat16, which NumPy lacks, is converted to float32."""
        rows = self.to_torch(positions)
        return (rows.float() if rows.dtype is torch.bfloat16 else rows).numpy()

    def blocks(self, num_rows: int = STATISTICS_ROWS) -> Iterator[torch.Tensor]:
        """Yield all rows in tensors of at most `num_rows` rows."""
        for first in range(0, self.num_rows, num_rows):
            yield self._rows(first, min(first + num_rows, self.num_rows))

    def _rows(self, first: int, stop: int) -> torch.Tensor:
        if stop <= first:
            return torch.empty(0, self.width, dtype=self.dtype)
        row_bytes = self.width * self.dtype.itemsize
        # Copy on write: tensors must be writable, files must not change.
        mapped = np.memmap(
            self.path,
            np.uint8,
            mode="c",
            offset=self.offset + first * row_bytes,
            shape=((stop - first) * row_bytes,),
        )
        return rows_in(mapped.data, (stop - first, self.width), self.dtype)


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics over rows, computed in float64."""

    num_rows: int
    mean: torch.Tensor  # [width]
    std: torch.Tensor  # [width]
    mean_norm: float
    """The mean L2 norm of the rows."""
    largest: float
    """The largest magnitude of any value."""


def statistics_of(blocks: Iterable[torch.Tensor]) -> Statistics | None:
    """Statistics of the rows in blocks `[rows, width]`; None if there are none."""
    count, norms, largest = 0, 0.0, 0.0
    total: Any = 0.0
    squares: Any = 0.0
    for values in map(torch.Tensor.double, blocks):
        count += len(values)
        total = total + values.sum(dim=0)
        squares = squares + values.square().sum(dim=0)
        norms += values.norm(dim=1).sum().item()
        largest = max(largest, values.abs().max().item())
    if not count:
        return None
    mean = total / count
    std = (squares / count - mean.square()).clamp(min=0).sqrt()
    return Statistics(count, mean, std, norms / count, largest)


class CaptureStore:
    """All rows that a filesystem consumer has written to a root."""

    def __init__(self, root: str | Path) -> None:
        """Read the indices.

        Raises:
            FileNotFoundError: `root` is not a directory.
            ValueError: a file was written by an earlier public fork in several pieces
                per key, or by an earlier build as encoded rows.

        """
        self.root = Path(root)
        if not self.root.is_dir():
            raise FileNotFoundError(f"{self.root} is not a folder")
        found: dict[tuple[str, str, int, str], StoredRows] = {}
        for rows in _scan(self.root):
            found[rows.tag, rows.request_id, rows.layer, rows.hook] = rows
        self._rows = list(found.values())

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def requests(self) -> list[tuple[str, str]]:
        """`(tag, request id)` of every request, sorted."""
        return sorted({(rows.tag, rows.request_id) for rows in self._rows})

    def select(
        self,
        request_id: str | None = None,
        layer: int | None = None,
        hook: str | None = None,
        tag: str | None = None,
    ) -> list[StoredRows]:
        """The rows that match all given arguments, sorted by tag, request, layer, hook.

        Args:
            request_id: the name of a request.
            layer: 0-based index of a block.
            hook: a hook point.
            tag: a tag.

        """
        fitting = [
            rows
            for rows in self._rows
            if request_id in (None, rows.request_id)
            and layer in (None, rows.layer)
            and hook in (None, rows.hook)
            and tag in (None, rows.tag)
        ]
        return sorted(fitting, key=lambda r: (r.tag, r.request_id, r.layer, r.hook))

    def one(
        self, request_id: str, layer: int, hook: str, tag: str | None = None
    ) -> StoredRows:
        """The rows of one request at one tap.

        Raises:
            KeyError: there are none, or they exist under several tags.

        """
        found = self.select(request_id, layer, hook, tag)
        if len(found) != 1:
            which = f"request {request_id!r}, layer {layer}, {hook!r}"
            tags = [rows.tag for rows in found]
            raise KeyError(
                f"{which} exists under several tags, {tags}; give one of them"
                if found
                else f"{which} was not captured under {self.root}"
            )
        return found[0]

    def statistics(self, **which: Any) -> Statistics:
        """Statistics of all rows in `select(**which)`.

        Raises:
            ValueError: there are none.

        """
        chosen = self.select(**which)
        found = statistics_of(block for rows in chosen for block in rows.blocks())
        if found is None:
            raise ValueError(f"there is no row with {which}")
        return found

    def layer_cosines(
        self, request_id: str, hook: str, tag: str | None = None
    ) -> tuple[list[int], torch.Tensor]:
        """Cosine similarity between the layers of a request.

        Returns:
            The layers, and a matrix `[layers, layers]`: the cosine between the rows of
            two layers at the same position, averaged over their common positions.

        """
        found = self.select(request_id, hook=hook, tag=tag)
        matrix = torch.eye(len(found))
        for i, first in enumerate(found):
            for j, second in enumerate(found[:i]):
                matrix[i, j] = matrix[j, i] = cosine(first, second).mean()
        return [rows.layer for rows in found], matrix

    def request_cosines(
        self, layer: int, hook: str, tag: str | None = None
    ) -> tuple[list[str], torch.Tensor]:
        """Cosine similarity between requests at one tap.

        Returns:
            The request ids, and a matrix `[requests, requests]`: the cosine between the
            mean rows of two requests.

        """
        found = [rows for rows in self.select(None, layer, hook, tag) if len(rows)]
        means = [
            torch.stack([block.double().sum(dim=0) for block in rows.blocks()]).sum(
                dim=0
            )
            / len(rows)
            for rows in found
        ]
        if not means:
            return [], torch.empty(0, 0)
        unit = torch.nn.functional.normalize(torch.stack(means), dim=1)
        return [rows.request_id for rows in found], (unit @ unit.T).float()


def cosine(first: StoredRows, second: StoredRows) -> torch.Tensor:
    """The cosine between the rows at each common position, `[positions]`."""
    shared = sorted(set(first.positions) & set(second.positions))
    a, b = first.to_torch(shared).double(), second.to_torch(shared).double()
    return torch.nn.functional.cosine_similarity(a, b, dim=1).float()


def _scan(root: Path) -> Iterator[StoredRows]:
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        if folder.name == ASIDE:
            continue
        found = list(shard_indices(folder))
        for own in sorted(path for path in folder.iterdir() if path.is_dir()):
            found += own_indices(own)
        # Later files of a request replace earlier ones.
        for path, index in sorted(found, key=lambda one: one[0].stat().st_mtime_ns):
            _check_whole(path, index)
            requests = index.get("requests")
            for entry in index.get("entries", [{"offset": 0, **index}]):
                facts = index if requests is None else requests[entry["request"]]
                yield _stored(folder.name, path, facts, entry)


def _check_whole(path: Path, index: dict[str, Any]) -> None:
    """Refuse files with several entries per key, as an earlier public fork writes.

    Raises:
        ValueError: there are; names the file and the functions that can read it.

    """
    keys = [
        (e.get("request_id"), e.get("request"), e["layer"], e["hook"])
        for e in index.get("entries", ())
    ]
    if len(set(keys)) < len(keys):
        raise ValueError(
            f"{path} has keys in several pieces, which CaptureStore does not join; "
            "read_request and read_sharded do"
        )


def _stored(
    tag: str, path: Path, facts: dict[str, Any], entry: dict[str, Any]
) -> StoredRows:
    check_raw(entry, str(path))
    return StoredRows(
        tag=tag,
        request_id=entry.get("request_id") or facts["request_id"],
        layer=entry["layer"],
        hook=entry["hook"],
        path=path.with_suffix(".bin"),
        offset=entry["offset"],
        num_rows=entry["shape"][0],
        width=entry["shape"][1],
        dtype=getattr(torch, entry.get("dtype", facts["dtype"])),
        positions=entry.get("positions") or facts.get("positions") or (),
        token_ids=entry.get("token_ids") or facts.get("token_ids") or (),
        heads=tuple(entry.get("heads", ())),
    )

# SPDX-License-Identifier: Apache-2.0
"""Zarr, format 2 of its specification: a folder of uncompressed chunks per shard.

The format is described at zarr-specs.readthedocs.io (version 2): `.zgroup`, `.zarray`
and chunk files named by their indices. A shard is one group; arrays have one chunk per
`ROWS_PER_CHUNK` rows, the last one padded as the specification requires.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from vllm.capture_dataset.formats.tensors import write_columns
from vllm.capture_dataset.table import Shard

ROWS_PER_CHUNK = 4096

Array = np.ndarray[Any, np.dtype[Any]]


def write_zarr(shard: Shard, path: Path, facts: dict[str, Any]) -> list[Path]:
    """Write `{path}.zarr` with arrays `{hook}/{layer}` `[rows, hidden_size]`.

    Numeric columns are arrays `[rows]`; `{path}.rows.parquet` has all columns.
    """
    group = path.with_suffix(".zarr")
    _group(group, {"facts": facts})
    for layer, hook in shard.taps:
        if not (group / hook).is_dir():
            _group(group / hook, {})
        _array(group / hook / str(layer), shard.values((layer, hook)).numpy())
    for name in ("sample", "position", "is_prompt", "token_id"):
        column = shard.columns[name].to_numpy(zero_copy_only=False)
        _array(group / name, np.ascontiguousarray(column))
    return [group, write_columns(shard, path)]


def _group(folder: Path, attributes: dict[str, Any]) -> None:
    folder.mkdir(parents=True)
    (folder / ".zgroup").write_text(json.dumps({"zarr_format": 2}))
    (folder / ".zattrs").write_text(json.dumps(attributes))


def _array(folder: Path, values: Array) -> None:
    folder.mkdir(parents=True)
    chunk = (min(ROWS_PER_CHUNK, max(len(values), 1)), *values.shape[1:])
    metadata = {
        "zarr_format": 2,
        "shape": list(values.shape),
        "chunks": list(chunk),
        "dtype": values.dtype.str,
        "compressor": None,
        "filters": None,
        "fill_value": 0,
        "order": "C",
    }
    (folder / ".zarray").write_text(json.dumps(metadata))
    names = ".0" * (values.ndim - 1)
    for number, first in enumerate(range(0, len(values), chunk[0])):
        part = values[first : first + chunk[0]]
        with (folder / f"{number}{names}").open("wb") as opened:
            part.tofile(opened)
            missing = chunk[0] - len(part)
            if missing:
                np.zeros((missing, *chunk[1:]), values.dtype).tofile(opened)

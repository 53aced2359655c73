# SPDX-License-Identifier: Apache-2.0
"""Safetensors: one tensor per tap, and the other columns in a second file."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import save_file

from vllm.capture_dataset.readouts import beside
from vllm.capture_dataset.table import Shard


def write_safetensors(shard: Shard, path: Path, facts: dict[str, Any]) -> list[Path]:
    """Write `{path}.safetensors` with tensors `{hook}.{layer}` `[rows, hidden_size]`.

    Numeric columns are tensors `[rows]` too; `{path}.rows.parquet` has all columns,
    with one line for each row of the tensors.
    """
    tensors = {f"{tap[1]}.{tap[0]}": shard.values(tap) for tap in shard.taps}
    for name in ("sample", "position", "is_prompt", "token_id"):
        column = shard.columns[name].to_numpy(zero_copy_only=False)
        tensors[name] = torch.from_numpy(column.copy())
    written = path.with_suffix(".safetensors")
    save_file(tensors, written, {"facts": json.dumps(facts)})
    # save_file makes files readable by their owner only, unlike all other formats.
    written.chmod(0o644)
    return [written, write_columns(shard, path)]


def write_columns(shard: Shard, path: Path) -> Path:
    """Write `{path}.rows.parquet`, with one line for the rows of all taps at a token.

    Results that a readout has per tap are in columns that end in `.{hook}.{layer}`.
    """
    written = path.with_suffix(".rows.parquet")
    columns = dict(shard.columns)
    for column in shard.readouts_by_tap:
        for tap in column.taps:
            columns[beside(column, tap)] = column.of_tap(tap, shard.items)
    pq.write_table(pa.table(columns), written, compression="zstd")
    return written

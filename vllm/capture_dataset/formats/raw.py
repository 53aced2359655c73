# SPDX-License-Identifier: Apache-2.0
"""The files of the consumer `filesystem`, layout `sharded`: raw bytes and an index."""

import json
from pathlib import Path
from typing import Any

import torch

from vllm.capture_dataset.formats.tensors import write_columns
from vllm.capture_dataset.table import Captured, Shard


def write_raw(shard: Shard, path: Path, facts: dict[str, Any]) -> list[Path]:
    """Write `default/shard-000-{number}`: `.bin`, `.json` and `.rows.parquet`."""
    # The folder is a tag, which the consumer's readers expect.
    folder = path.parent / "default"
    folder.mkdir(exist_ok=True)
    path = folder / f"shard-000-{shard.number:06d}"
    written = path.with_suffix(".bin")
    entries = []
    offset = 0
    with written.open("wb") as opened:
        for tap in shard.taps:
            values = shard.values(tap)
            opened.write(values.view(torch.uint8).numpy().tobytes())
            row_bytes = values.shape[1] * values.element_size()
            for number, (item, count) in enumerate(zip(shard.items, shard.counts)):
                size = int(count) * row_bytes
                entries.append(
                    {
                        "request_id": item.prompt.entry.prompt_id,
                        "request": number,
                        "layer": tap[0],
                        "hook": tap[1],
                        "offset": offset,
                        "nbytes": size,
                        "shape": [int(count), values.shape[1]],
                    }
                )
                offset += size
    content = {
        "layout": "sharded",
        "dtype": shard.stored_dtype,
        "requests": [_request(item, shard, facts) for item in shard.items],
        "entries": entries,
    }
    index = path.with_suffix(".json")
    index.write_text(json.dumps(content), encoding="utf-8")
    return [written, index, write_columns(shard, path)]


def _request(item: Captured, shard: Shard, facts: dict[str, Any]) -> dict[str, Any]:
    """The facts of a prompt, in the field names of the consumer's sidecars."""
    entry = item.prompt.entry
    return {
        "request_id": entry.prompt_id,
        "sample": entry.sample,
        "carried": dict(zip(shard.carried, entry.carried)),
        "dtype": shard.stored_dtype,
        "model": facts["model"]["name"],
        "layer_convention": facts["layer_convention"],
        "num_prompt_tokens": len(item.prompt.token_ids),
        "num_generated_tokens": len(item.token_ids) - len(item.prompt.token_ids),
        "positions": item.positions,
        "token_ids": [item.token_ids[position] for position in item.positions],
    }

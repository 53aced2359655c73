# SPDX-License-Identifier: Apache-2.0
"""Parquet: row groups per tap of a shard."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from vllm.capture_dataset.table import Shard

ROWS_PER_GROUP = 1 << 16


def write_parquet(shard: Shard, path: Path, facts: dict[str, Any]) -> list[Path]:
    """Write `{path}.parquet`."""
    path = path.with_suffix(".parquet")
    metadata = {
        "model": facts["model"]["name"],
        "layer_convention": facts["layer_convention"],
        "captured_dtype": facts["model"]["dtype"],
        "stored_dtype": shard.stored_dtype,
        "facts": json.dumps(facts),
    }
    schema = shard.schema(facts["model"]["hidden_size"], metadata)
    beside = [name for name in schema.names if name != "values"]
    with pq.ParquetWriter(
        path,
        schema,
        compression=facts["compression"],
        # Activations do not repeat, so a dictionary would cost time and save nothing.
        use_dictionary=beside,
        write_statistics=beside,
    ) as writer:
        for tap in shard.taps:
            writer.write_batch(shard.batch(tap, schema), row_group_size=ROWS_PER_GROUP)
    return [path]

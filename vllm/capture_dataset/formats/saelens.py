# SPDX-License-Identifier: Apache-2.0
"""Shards of SAELens' cached activations, in the form that the consumer `arrow` defines.

Rows of consecutive prompts fill the contexts; rows at the end of a shard that do not
fill a context are dropped.
"""

from pathlib import Path
from typing import Any

import pyarrow as pa

from vllm.capture_dataset.table import Shard
from vllm.v1.capture.consumers.arrow.saelens import contexts_of, hook_name


def write_saelens(shard: Shard, path: Path, facts: dict[str, Any]) -> list[Path]:
    """Write `{path}.arrow`, an Arrow IPC stream as the library `datasets` writes it."""
    size = facts["context_size"]
    count = shard.num_rows // size * size
    ids = shard.columns["token_id"].to_numpy()[:count]
    values = {hook_name(*tap): shard.values(tap).numpy()[:count] for tap in shard.taps}
    batch = contexts_of(values, ids, size)
    written = path.with_suffix(".arrow")
    with (
        pa.OSFile(str(written), "wb") as opened,
        pa.ipc.new_stream(opened, batch.schema) as writer,
    ):
        writer.write_batch(batch)
    return [written]

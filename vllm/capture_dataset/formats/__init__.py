# SPDX-License-Identifier: Apache-2.0
"""Writers of shards, by the name of the format.

A writer receives a shard and a path in a temporary folder, and writes its files there.
They are renamed when they are complete.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm.capture_dataset.formats.saelens import write_saelens
from vllm.capture_dataset.formats.tables import write_parquet
from vllm.capture_dataset.formats.tensors import write_safetensors
from vllm.capture_dataset.table import Shard

Writer = Callable[[Shard, Path, dict[str, Any]], list[Path]]
"""Takes a shard, a path without an extension, and the manifest's facts; returns what
was written, first the file that represents the shard."""

WRITERS: dict[str, Writer] = {
    "parquet": write_parquet,
    "safetensors": write_safetensors,
    "saelens": write_saelens,
}

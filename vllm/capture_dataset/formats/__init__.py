# SPDX-License-Identifier: Apache-2.0
"""How shards are written, by the name of the format.

A writer gets a shard and a path in a folder aside, and writes one file or folder there.
It is renamed once it is whole.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm.capture_dataset.formats.raw import write_raw
from vllm.capture_dataset.formats.saelens import write_saelens
from vllm.capture_dataset.formats.tables import write_arrow, write_parquet
from vllm.capture_dataset.formats.tensors import write_safetensors
from vllm.capture_dataset.formats.zarr import write_zarr
from vllm.capture_dataset.table import Shard

Writer = Callable[[Shard, Path, dict[str, Any]], list[Path]]
"""From a shard, a path without an ending, and the manifest's facts to what was written,
the file or folder that stands for the shard first."""

WRITERS: dict[str, Writer] = {
    "parquet": write_parquet,
    "arrow": write_arrow,
    "safetensors": write_safetensors,
    "saelens": write_saelens,
    "filesystem": write_raw,
    "zarr": write_zarr,
}

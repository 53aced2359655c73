# SPDX-License-Identifier: Apache-2.0
"""Writers of shards, by the name of the format.

A writer receives a shard and a path in a temporary folder, and writes one file or
folder there. It is renamed when it is complete.
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
"""Takes a shard, a path without an extension, and the manifest's facts; returns what
was written, first the file or folder that represents the shard."""

WRITERS: dict[str, Writer] = {
    "parquet": write_parquet,
    "arrow": write_arrow,
    "safetensors": write_safetensors,
    "saelens": write_saelens,
    "filesystem": write_raw,
    "zarr": write_zarr,
}

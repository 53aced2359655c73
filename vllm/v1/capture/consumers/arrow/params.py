# SPDX-License-Identifier: Apache-2.0
"""The parameters of the consumer `arrow`."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from vllm.v1.capture.consumers.storage.options import Options
from vllm.v1.capture.consumers.storage.params import StorageParams

ArrowFormat = Literal["parquet", "ipc", "safetensors"]
FORMATS: tuple[ArrowFormat, ...] = ("parquet", "ipc", "safetensors")
Bfloat16 = Literal["bits", "float32"]
BFLOAT16: tuple[Bfloat16, ...] = ("bits", "float32")
COMPRESSIONS = ("none", "zstd", "lz4")

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ArrowParams(StorageParams):
    """The parameters in `--capture-consumers arrow:...`."""

    kind: ClassVar[str] = "arrow"

    format: ArrowFormat = "parquet"
    """`parquet` or `ipc`: rows of many requests in one table per file.
    `safetensors`: one file per request."""
    compression: str = "none"
    """Compression of tables: `none`, `zstd` or `lz4`; ignored for `safetensors`."""
    bfloat16: Bfloat16 = "bits"
    """How tables store bfloat16, which Arrow lacks: `bits`, one binary value per row,
    or `float32`, a list of twice the size."""
    shard_max_bytes: int = 512 * MIB
    """Size of the file in bytes at which a table is sealed."""

    @classmethod
    def _check(cls, options: Options) -> None:
        options.choice("format", FORMATS)
        options.choice("compression", COMPRESSIONS)
        options.choice("bfloat16", BFLOAT16)

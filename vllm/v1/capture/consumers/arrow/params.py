# SPDX-License-Identifier: Apache-2.0
"""The parameters of the consumer `arrow`."""

from dataclasses import dataclass, fields
from typing import Any, Literal

from vllm.v1.capture.consumers.storage.options import Options
from vllm.v1.capture.consumers.storage.params import StorageParams, check_shared

ArrowFormat = Literal["parquet", "ipc", "safetensors"]
FORMATS: tuple[ArrowFormat, ...] = ("parquet", "ipc", "safetensors")
Bfloat16 = Literal["bits", "float32"]
BFLOAT16: tuple[Bfloat16, ...] = ("bits", "float32")
COMPRESSIONS = ("none", "zstd", "lz4")

WHERE = "capture_consumers.arrow"


MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ArrowParams(StorageParams):
    """The parameters in `--capture-consumers arrow:...`."""

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
    def parse(cls, raw: dict[str, Any]) -> "ArrowParams":
        """Parse the configured parameters.

        Raises:
            CaptureValidationError: names the parameter, the value and the remedy.

        """
        options = Options(WHERE, raw, [field.name for field in fields(cls)])
        check_shared(options, WHERE, "arrow")
        options.choice("format", FORMATS)
        options.choice("compression", COMPRESSIONS)
        options.choice("bfloat16", BFLOAT16)
        return cls(**options.values)

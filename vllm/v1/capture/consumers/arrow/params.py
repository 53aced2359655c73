# SPDX-License-Identifier: Apache-2.0
"""The parameters of the consumer `arrow`."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from vllm.v1.capture.consumers.storage.files import path_part
from vllm.v1.capture.consumers.storage.options import Options

ArrowFormat = Literal["parquet", "ipc", "safetensors"]
FORMATS: tuple[ArrowFormat, ...] = ("parquet", "ipc", "safetensors")
Bfloat16 = Literal["bits", "float32"]
BFLOAT16: tuple[Bfloat16, ...] = ("bits", "float32")
COMPRESSIONS = ("none", "zstd", "lz4")

WHERE = "capture_consumers.arrow"

_EARLIER = ("layout", "context_size")
"""Parameters of earlier versions, which are refused."""

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ArrowParams:
    """The parameters in `--capture-consumers arrow:...`."""

    root: Path
    """The directory for all files."""
    format: ArrowFormat = "parquet"
    """`parquet` or `ipc`: rows of many requests in one table per file.
    `safetensors`: one file per request."""
    compression: str = "none"
    """Compression of tables: `none`, `zstd` or `lz4`; ignored for `safetensors`."""
    fsync: bool = False
    """Whether files are synced to disk before they get their final name."""
    bfloat16: Bfloat16 = "bits"
    """How tables store bfloat16, which Arrow lacks: `bits`, one binary value per row,
    or `float32`, a list of twice the size."""
    writer_threads: int | None = None
    """Maximum number of threads that encode and write, each to its own table. None:
    half of the cores, from 2 to 8."""
    queue_size: int = 1024
    """Maximum number of ended requests that wait for a thread."""
    timeout_seconds: float = 60.0
    """Maximum time from the end of a request until its rows are written."""
    buffer_bytes: int | None = None
    """Maximum bytes of rows in memory, over all requests; more are spilled to disk.
    None: several of the largest requests, at most an eighth of the machine's memory."""
    shard_max_bytes: int = 512 * MIB
    """Size of the file in bytes at which a table is sealed."""
    global_hooks: Any = None
    """What is captured of every request: hook point -> layer selector."""
    global_positions: Any = "last_prompt"
    """The positions that are captured of every request."""
    default_tag: str = "default"
    """The tag of requests that do not choose one."""

    @classmethod
    def parse(cls, raw: dict[str, Any]) -> "ArrowParams":
        """Parse the configured parameters.

        Raises:
            CaptureValidationError: names the parameter, the value and the remedy.

        """
        known = [field.name for field in fields(cls)]
        options = Options(WHERE, raw, [*known, *_EARLIER])
        for name in _EARLIER:
            if name in raw:
                raise options.wrong(
                    name,
                    raw[name],
                    "drop it; SAELens' cached activations are written by "
                    "`vllm capture --format saelens`",
                )
        options.root("root", "arrow:root=/data")
        options.choice("format", FORMATS)
        options.choice("compression", COMPRESSIONS)
        options.choice("bfloat16", BFLOAT16)
        options.boolean("fsync")
        for name in ("queue_size", "shard_max_bytes"):
            options.whole(name)
        options.whole("writer_threads", most=64, optional=True)
        options.whole("buffer_bytes", optional=True)
        options.seconds("timeout_seconds")
        values = options.values
        if "default_tag" in values:
            values["default_tag"] = path_part(
                values["default_tag"], f"{WHERE}.default_tag"
            )
        return cls(**values)

# SPDX-License-Identifier: Apache-2.0
"""The arrow consumer's parameters."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from vllm.v1.capture.consumers.storage.names import path_part
from vllm.v1.capture.consumers.storage.options import Options

ArrowFormat = Literal["parquet", "ipc", "safetensors"]
FORMATS: tuple[ArrowFormat, ...] = ("parquet", "ipc", "safetensors")
Bfloat16 = Literal["bits", "float32"]
BFLOAT16: tuple[Bfloat16, ...] = ("bits", "float32")
COMPRESSIONS = ("none", "zstd", "lz4")

WHERE = "capture_consumers.arrow"

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ArrowParams:
    """The consumer's parameters, as `--capture-consumers arrow:...` gives them."""

    root: Path
    """The folder below which everything is written."""
    format: ArrowFormat = "parquet"
    """`parquet` or `ipc`: rows of many requests in one table per file.
    `safetensors`: one file per request."""
    compression: str = "none"
    """Of the values: `none`, `zstd` or `lz4`; not for `safetensors`."""
    fsync: bool = False
    """Whether a file is forced to the disk before it gets its name."""
    bfloat16: Bfloat16 = "bits"
    """How tables hold bfloat16, which Arrow does not have: `bits`, a binary value per
    row, or `float32`, a list of numbers of twice the size."""
    writer_threads: int | None = None
    """Threads that encode and write, at most, each to a table of its own; None: half
    of the cores, from 2 to 8."""
    queue_size: int = 1024
    """How many requests that have ended may wait for a thread."""
    timeout_seconds: float = 60.0
    """How long the rows of a request may take to be written, from its end."""
    buffer_bytes: int | None = None
    """Rows in memory over all requests; more are spilled. None: room for several of
    the largest requests, and an eighth of the machine's memory at most."""
    shard_max_bytes: int = 512 * MIB
    """A table is sealed when its file has grown to this size."""
    global_hooks: Any = None
    """What is captured of every request: hook point -> layer selector."""
    global_positions: Any = "last_prompt"
    """At which positions of every request."""
    default_tag: str = "default"
    """The tag of requests that name none."""

    @classmethod
    def parse(cls, raw: dict[str, Any]) -> "ArrowParams":
        """The parameters that a dictionary stands for.

        Raises:
            CaptureValidationError: naming the parameter, the value, the remedy.

        """
        options = Options(WHERE, raw, [field.name for field in fields(cls)])
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

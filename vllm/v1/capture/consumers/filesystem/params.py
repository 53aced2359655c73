# SPDX-License-Identifier: Apache-2.0
"""The parameters of the consumer `filesystem`."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from vllm.logger import init_logger
from vllm.v1.capture.consumers.filesystem.types import LAYOUTS, Layout
from vllm.v1.capture.consumers.storage.codecs import parse_codec
from vllm.v1.capture.consumers.storage.files import path_part
from vllm.v1.capture.consumers.storage.options import Options

logger = init_logger(__name__)

Collision = Literal["overwrite", "error"]
COLLISIONS: tuple[Collision, ...] = ("overwrite", "error")

WHERE = "capture_consumers.filesystem"

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class FilesystemParams:
    """The parameters in `--capture-consumers filesystem:...`."""

    root: Path
    """The directory for all files."""
    default_layout: Layout = "per_file"
    """The layout of requests that do not choose one."""
    codec: str = "raw"
    """The codec of requests that do not choose one."""
    on_collision: Collision = "overwrite"
    """What happens if files of a request exist. Shards never overwrite one another; of
    two requests with the same name, the later one is read."""
    fsync: bool = False
    """Whether files are synced to disk before they get their final name."""
    writer_threads: int | None = None
    """Maximum number of threads that encode and write. None: half of the cores, from 2
    to 8."""
    queue_size: int = 1024
    """Maximum number of ended requests that wait for a thread."""
    timeout_seconds: float = 60.0
    """Maximum time from the end of a request until its rows are written."""
    coalesce_max_bytes: int = 32 * MIB
    """Maximum bytes written per system call; 0 means the default."""
    buffer_bytes: int | None = None
    """Maximum bytes of rows in memory, over all requests; more are spilled to disk.
    None: several of the largest requests, at most an eighth of the machine's memory."""
    num_shards: int = 4
    """Number of shards that requests are distributed to (layout `sharded`)."""
    shard_max_bytes: int = 1024 * MIB
    """Size in bytes at which a shard is sealed."""
    global_hooks: Any = None
    """What is captured of every request: hook point -> layer selector."""
    global_positions: Any = "last_prompt"
    """The positions that are captured of every request."""
    default_tag: str = "default"
    """The tag of requests that do not choose one."""
    atomic_publish: bool = True
    """Accepted for compatibility; files always get their final name when complete."""
    fd_cache_size: int = 256
    """Accepted for compatibility; no file is kept open between writes."""

    @classmethod
    def parse(cls, raw: dict[str, Any]) -> "FilesystemParams":
        """Parse the configured parameters.

        Raises:
            CaptureValidationError: names the parameter, the value and the remedy.

        """
        options = Options(WHERE, raw, [field.name for field in fields(cls)])
        options.root("root", "filesystem:root=/data")
        options.choice("default_layout", LAYOUTS)
        options.choice("on_collision", COLLISIONS)
        for name in ("fsync", "atomic_publish"):
            options.boolean(name)
        if options.values.get("coalesce_max_bytes") == 0:
            del options.values["coalesce_max_bytes"]  # The default, elsewhere too.
        for name in (
            "queue_size",
            "coalesce_max_bytes",
            "num_shards",
            "shard_max_bytes",
            "fd_cache_size",
        ):
            options.whole(name)
        options.whole("num_shards", most=1000)
        options.whole("writer_threads", most=64, optional=True)
        options.whole("buffer_bytes", optional=True)
        options.seconds("timeout_seconds")
        values = options.values
        if "codec" in values:
            parse_codec(values["codec"], f"{WHERE}.codec")
        if "default_tag" in values:
            values["default_tag"] = path_part(
                values["default_tag"], f"{WHERE}.default_tag"
            )
        for name in ("atomic_publish", "fd_cache_size"):
            if name in raw:
                logger.info_once(
                    "filesystem: %s has no effect: %s",
                    name,
                    "files always get their name when they are complete"
                    if name == "atomic_publish"
                    else "no file stays open between writes",
                )
        return cls(**values)

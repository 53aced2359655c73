# SPDX-License-Identifier: Apache-2.0
"""The filesystem consumer's parameters."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from vllm.logger import init_logger
from vllm.v1.capture.consumers.filesystem.types import LAYOUTS, Layout
from vllm.v1.capture.consumers.storage.codecs import parse_codec
from vllm.v1.capture.consumers.storage.names import path_part
from vllm.v1.capture.consumers.storage.options import Options

logger = init_logger(__name__)

Collision = Literal["overwrite", "error"]
COLLISIONS: tuple[Collision, ...] = ("overwrite", "error")

WHERE = "capture_consumers.filesystem"

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class FilesystemParams:
    """The consumer's parameters, as `--capture-consumers filesystem:...` gives them."""

    root: Path
    """The folder below which everything is written."""
    default_layout: Layout = "per_file"
    """How rows lie in files unless a request says otherwise."""
    codec: str = "raw"
    """How rows are encoded unless a request says otherwise."""
    on_collision: Collision = "overwrite"
    """What happens when a request's files are there already. Shards never
    overwrite one another; of two requests with one name the later is read."""
    fsync: bool = False
    """Whether a file is forced to the disk before it gets its name."""
    writer_threads: int | None = None
    """Threads that encode and write, at most; None: half of the cores, from 2 to 8."""
    queue_size: int = 1024
    """How many requests that have ended may wait for a thread."""
    timeout_seconds: float = 60.0
    """How long the rows of a request may take to be written, from its end."""
    coalesce_max_bytes: int = 32 * MIB
    """Bytes that one system call writes at most; 0 is the default."""
    buffer_bytes: int | None = None
    """Rows in memory over all requests; more are spilled. None: room for several of
    the largest requests, and an eighth of the machine's memory at most."""
    num_shards: int = 4
    """Over how many shards requests are spread (layout `sharded`)."""
    shard_max_bytes: int = 1024 * MIB
    """A shard is sealed when it has grown to this size."""
    global_hooks: Any = None
    """What is captured of every request: hook point -> layer selector."""
    global_positions: Any = "last_prompt"
    """At which positions of every request."""
    default_tag: str = "default"
    """The tag of requests that name none."""
    atomic_publish: bool = True
    """Accepted; files always get their name when they are whole."""
    fd_cache_size: int = 256
    """Accepted; files are written at once, so none is kept open."""

    @classmethod
    def parse(cls, raw: dict[str, Any]) -> "FilesystemParams":
        """The parameters that a dictionary stands for.

        Raises:
            CaptureValidationError: naming the parameter, the value, the remedy.

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
                    "filesystem: %s changes nothing: %s",
                    name,
                    "files always get their name when they are whole"
                    if name == "atomic_publish"
                    else "no file is kept open between writes",
                )
        return cls(**values)

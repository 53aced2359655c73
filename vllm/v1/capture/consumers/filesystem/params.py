# SPDX-License-Identifier: Apache-2.0
"""The parameters of the consumer `filesystem`."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from vllm.logger import init_logger
from vllm.v1.capture.consumers.filesystem.types import LAYOUTS, Layout
from vllm.v1.capture.consumers.storage.options import Options
from vllm.v1.capture.consumers.storage.params import StorageParams

logger = init_logger(__name__)

Collision = Literal["overwrite", "error"]
COLLISIONS: tuple[Collision, ...] = ("overwrite", "error")

_WITHOUT_EFFECT = {
    "atomic_publish": "files always get their name when they are complete",
    "fd_cache_size": "no file stays open between writes",
}

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class FilesystemParams(StorageParams):
    """The parameters in `--capture-consumers filesystem:...`."""

    kind: ClassVar[str] = "filesystem"

    default_layout: Layout = "per_file"
    """The layout of requests that do not choose one."""
    on_collision: Collision = "overwrite"
    """What happens if files of a request exist. Shards never overwrite one another; of
    two requests with the same name, the later one is read."""
    coalesce_max_bytes: int = 32 * MIB
    """Maximum bytes written per system call; 0 means the default."""
    num_shards: int = 4
    """Number of shards that requests are distributed to (layout `sharded`)."""
    shard_max_bytes: int = 1024 * MIB
    """Size in bytes at which a shard is sealed."""
    atomic_publish: bool = True
    """Accepted for compatibility; files always get their final name when complete."""
    fd_cache_size: int = 256
    """Accepted for compatibility; no file is kept open between writes."""

    @classmethod
    def _check(cls, options: Options) -> None:
        options.choice("default_layout", LAYOUTS)
        options.choice("on_collision", COLLISIONS)
        options.boolean("atomic_publish")
        if options.values.get("coalesce_max_bytes") == 0:
            del options.values["coalesce_max_bytes"]  # The default, elsewhere too.
        for name in ("coalesce_max_bytes", "num_shards", "fd_cache_size"):
            options.whole(name)
        options.whole("num_shards", most=1000)
        for name, why in _WITHOUT_EFFECT.items():
            if name in options.values:
                logger.info_once("filesystem: %s has no effect: %s", name, why)

# SPDX-License-Identifier: Apache-2.0
"""The parameters that all storage consumers have."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from vllm.v1.capture.consumers.storage.files import path_part
from vllm.v1.capture.consumers.storage.options import Options
from vllm.v1.residual.machine import memory_bytes, writer_threads
from vllm.v1.residual.sizes import num_layers, row_bytes

if TYPE_CHECKING:
    from vllm.config import VllmConfig

LEAST_BUFFER = 256 << 20
"""Minimum default of `buffer_bytes`."""
MEMORY_SHARE = 8
"""The default of `buffer_bytes` is at most the machine's memory divided by this."""
REQUESTS_HELD = 4
"""By default the buffer holds this many of the largest requests per writer thread."""


@dataclass(frozen=True, kw_only=True)
class StorageParams:
    """The parameters in `--capture-consumers NAME:...`."""

    kind: ClassVar[str]
    """The consumer's name."""

    root: Path
    """The directory for all files."""
    fsync: bool = False
    """Whether files are synced to disk before they get their final name."""
    writer_threads: int | None = None
    """Maximum number of threads that encode and write. None: half of the cores, from 2
    to 8."""
    queue_size: int = 1024
    """Maximum number of ended requests that wait for a thread."""
    timeout_seconds: float = 60.0
    """Maximum time from the end of a request until its rows are written."""
    buffer_bytes: int | None = None
    """Maximum bytes of rows in memory, over all requests; more are spilled to disk.
    None: several of the largest requests, at most an eighth of the machine's memory."""
    shard_max_bytes: int = 512 << 20
    """Size in bytes at which a file that several requests share is sealed."""
    global_hooks: Any = None
    """What is captured of every request: hook point -> layer selector."""
    global_positions: Any = "last_prompt"
    """The positions that are captured of every request."""
    default_tag: str = "default"
    """The tag of requests that do not choose one."""

    @classmethod
    def parse(cls, raw: dict[str, Any]) -> Self:
        """Parse the configured parameters, and create the root.

        Raises:
            CaptureValidationError: names the parameter, the value and the remedy.

        """
        where = f"capture_consumers.{cls.kind}"
        options = Options(where, raw, [field.name for field in fields(cls)])
        options.root("root", f"{cls.kind}:root=/data")
        options.boolean("fsync")
        for name in ("queue_size", "shard_max_bytes"):
            options.whole(name)
        options.whole("writer_threads", most=64, optional=True)
        options.whole("buffer_bytes", optional=True)
        options.seconds("timeout_seconds")
        if "default_tag" in raw:
            tag = path_part(raw["default_tag"], f"{where}.default_tag")
            options.values["default_tag"] = tag
        cls._check(options)
        return cls(**options.values)

    @classmethod
    def _check(cls, options: Options) -> None:
        """Check the parameters of this consumer alone."""

    @property
    def num_threads(self) -> int:
        """`writer_threads`, or its default."""
        return self.writer_threads or writer_threads()

    def buffer(self, vllm_config: "VllmConfig | None") -> int:
        """`buffer_bytes`, or its default."""
        if self.buffer_bytes is not None:
            return self.buffer_bytes
        most = max(memory_bytes() // MEMORY_SHARE, LEAST_BUFFER)
        if vllm_config is None:
            return most
        model = vllm_config.model_config
        layers = num_layers(model)
        request = model.max_model_len * layers * row_bytes(model)
        return min(max(REQUESTS_HELD * writer_threads() * request, LEAST_BUFFER), most)
